"""Prints to the user's console, which may be closed; colors errors on a terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import TextIO

WRONG, CURE, PLAIN = "\x1b[1;31m", "\x1b[32m", "\x1b[0m"
"""Escape sequences: bold red, green, reset."""
_ERROR = re.compile(r"\Aerror:")
_REQUEST = re.compile(r"\Aerror: .*; nothing was started\n\n")
_KEY = re.compile(r"(?<=\n\n  )[^\s:=]+(?= = |: )")
_TRY = re.compile(r"(?<=\n    )try:    .*")


def say(text: str) -> None:
    """Prints ``text`` and flushes."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_output()


def tell(text: str) -> None:
    """Writes ``text`` and a newline to standard error in one call.

    ``print`` writes the newline separately. Under torchrun all ranks and their agent share one pipe: output
    of another process could come before the newline and break the last line, which names the log to read.
    """
    shown = _painted(text) if _in_color(sys.stderr, os.environ) else text
    sys.stderr.write(f"{shown}\n")
    sys.stderr.flush()


def _in_color(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Returns true if ``stream`` gets colors; like Python, obeys NO_COLOR first, then FORCE_COLOR."""
    if env.get("NO_COLOR"):
        return False
    return bool(env.get("FORCE_COLOR")) or (env.get("TERM") != "dumb" and stream.isatty())


def _painted(text: str) -> str:
    """Colors the first word of an error, and keys and cures of a wrong request; other text is unchanged.

    >>> _painted("error: rank 1 failed").replace("\\x1b", "^")
    '^[1;31merror:^[0m rank 1 failed'
    """
    if _REQUEST.match(text):
        text = _TRY.sub(rf"{CURE}\g<0>{PLAIN}", _KEY.sub(rf"{WRONG}\g<0>{PLAIN}", text))
    return _ERROR.sub(rf"{WRONG}\g<0>{PLAIN}", text)


def discard_output() -> None:
    """Redirects standard output to /dev/null: its reader has closed it, as ``| head`` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
