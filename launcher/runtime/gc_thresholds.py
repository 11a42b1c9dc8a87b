"""How often Python collects garbage: rarely while a command starts, as usual once ranks work."""

from __future__ import annotations

import gc

_SELDOM = (100_000, 50, 100)
_USUAL = gc.get_threshold()


def seldom() -> None:
    """Makes collections rare in a process that is about to import torch.

    The import creates half a million lasting objects; collecting takes a seventh of its time.
    """
    gc.set_threshold(*_SELDOM)


def freeze() -> None:
    """Excludes all objects that exist from collections, if ``seldom`` was called.

    A collection writes to each object that it examines, and so copies the memory that a fork shares. Other
    programs are left alone: ``gc.get_referrers`` does not see excluded objects either.
    """
    if gc.get_threshold() == _SELDOM:
        gc.freeze()


def as_usual() -> None:
    """Undoes ``seldom`` if it was called; objects that exist by then are not examined any more."""
    if gc.get_threshold() == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_USUAL)
