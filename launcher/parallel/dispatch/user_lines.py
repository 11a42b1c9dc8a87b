"""The line of the user's code that runs, or that raised an error."""

from __future__ import annotations

import traceback

import torch

OUTSIDE = (torch.__file__.rpartition("__init__")[0], __file__.rpartition("parallel")[0])
"""Paths of code that is not the user's."""


def of_error(error: BaseException) -> str:
    """Returns the user's file and line that raised ``error``, or "" if there is none."""
    return _last(traceback.extract_tb(error.__traceback__))


def of_now() -> str:
    """Returns the user's file and line that is running, or ""."""
    return _last(traceback.extract_stack())


def _last(frames: traceback.StackSummary) -> str:
    mine = [f for f in frames if not f.filename.startswith((*OUTSIDE, "<"))]
    if not mine:
        return ""
    last = mine[-1]
    return f"{last.filename.rpartition('/')[2]}:{last.lineno}"
