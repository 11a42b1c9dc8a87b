"""Prints to the user's console, which may have been closed."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Print ``text`` now."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        gone()


def tell(text: str) -> None:
    """Write ``text`` and the end of its last line to standard error, in one piece.

    ``print`` writes that end apart. Under torchrun all ranks and their agent share one pipe: what another
    says came between, and the last line, which names the log to read, was no line any more.
    """
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def gone() -> None:
    """Whoever read our words has left, as ``| head`` does: no reason to end a run.

    What else is said goes nowhere.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
