"""Prints to the user's console, which may have been closed; on a terminal errors have colours."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import TextIO

WRONG, CURE, PLAIN = "\x1b[1;31m", "\x1b[32m", "\x1b[0m"
"""Bold red, green."""
_ERROR = re.compile(r"\Aerror:")
_REQUEST = re.compile(r"\Aerror: .*; nothing was started\n\n")
_KEY = re.compile(r"(?<=\n\n  )[^\s:=]+(?= = |: )")
_TRY = re.compile(r"(?<=\n    )try:    .*")


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
    shown = _painted(text) if _in_colours(sys.stderr, os.environ) else text
    sys.stderr.write(f"{shown}\n")
    sys.stderr.flush()


def _in_colours(stream: TextIO, env: Mapping[str, str]) -> bool:
    """As Python itself decides it: NO_COLOR goes before FORCE_COLOR, which goes before what the stream is."""
    if env.get("NO_COLOR"):
        return False
    return bool(env.get("FORCE_COLOR")) or (env.get("TERM") != "dumb" and stream.isatty())


def _painted(text: str) -> str:
    """An error with its first word in colour; of a wrong request also keys and cures. Other text as it is.

    >>> _painted("error: rank 1 failed").replace("\\x1b", "^")
    '^[1;31merror:^[0m rank 1 failed'
    """
    if _REQUEST.match(text):
        text = _TRY.sub(rf"{CURE}\g<0>{PLAIN}", _KEY.sub(rf"{WRONG}\g<0>{PLAIN}", text))
    return _ERROR.sub(rf"{WRONG}\g<0>{PLAIN}", text)


def gone() -> None:
    """Whoever read our words has left, as ``| head`` does: no reason to end a run.

    What else is said goes nowhere.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
