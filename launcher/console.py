"""Words for the user's console, which may have stopped listening."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Print ``text`` now."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        gone()


def gone() -> None:
    """Whoever read our words has left, as ``| head`` does: no reason to end a run. What else is said goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
