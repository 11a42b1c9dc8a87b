"""How often Python collects garbage: seldom while a command starts, as usual once ranks work."""

from __future__ import annotations

import gc

_SELDOM = (100_000, 50, 100)
_USUAL = gc.get_threshold()


def seldom() -> None:
    """For a process that is about to import torch: half a million objects that stay.

    Looking takes a seventh of it.
    """
    gc.set_threshold(*_SELDOM)


def as_usual() -> None:
    """Undoes ``seldom``, if that was called; what there is by now is looked at no more."""
    if gc.get_threshold() == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_USUAL)
