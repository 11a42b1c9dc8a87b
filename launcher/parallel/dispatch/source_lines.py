"""File and line of the user's code that an error comes from, or that is running."""

from __future__ import annotations

import traceback

import torch

OUTSIDE = (torch.__file__.rpartition("__init__")[0], __file__.rpartition("parallel")[0])
"""Code that is not the user's."""


def of_error(error: BaseException) -> str:
    """File and line that ``error`` comes from; "" where none is the user's."""
    return _last(traceback.extract_tb(error.__traceback__))


def of_now() -> str:
    """File and line that is being run."""
    return _last(traceback.extract_stack())


def _last(frames: traceback.StackSummary) -> str:
    mine = [f for f in frames if not f.filename.startswith((*OUTSIDE, "<"))]
    if not mine:
        return ""
    last = mine[-1]
    return f"{last.filename.rpartition('/')[2]}:{last.lineno}"
