"""The answer to a command line, and the command that a reader of the answer types next."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.__main__ import check_words, main
from launcher.errors import RequestError
from launcher.job.args import parse
from launcher.job.compose import compose

HERE = Path(__file__).parent
BASES = {"mlp": "recipe=mlp_autoparallel", "lm": "recipe=lm_single model=lm_tiny", "pp": "model=lm_tiny"}


@dataclass(frozen=True)
class Row:
    """``meant``: the intended words; ``None`` if nobody can tell, and empty if only a part can be told."""

    typed: tuple[str, ...]
    meant: tuple[str, ...] | None
    says: str


def rows(name: str) -> dict[str, Row]:
    out = {}
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            typed, meant, says = (part.strip() for part in line.split(" | "))
            out[typed] = Row(
                _words(typed),
                None if meant == "-" else () if meant == "?" else _words(meant),
                says.replace("\\n", "\n"),
            )
    return out


def _words(text: str) -> tuple[str, ...]:
    base, _, rest = text.partition(" ")
    return tuple(shlex.split(f"{BASES[base]} {rest}" if base in BASES else text))


def answer(words: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and all output."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main(words)
    return code, said.getvalue()


def next_command(words: Sequence[str], said: str) -> tuple[str, ...] | None:
    """Return the words with each cure (``try:``) pasted, or ``None`` if there is no cure.

    A cure replaces what ``set by:`` shows, or else the arguments with which its problem begins; otherwise it is added.
    """
    out, cured = list(words), False
    for block in said.split("\n\n")[1:]:
        cure = re.search(r"^    try:    (.*)$", block, re.MULTILINE)
        if cure is None:
            continue
        cured = True
        new = shlex.split(cure[1])
        at, taken = _blamed(out, block)
        if new != out[at : at + taken]:
            out[at : at + taken] = [w for w in new if taken or w not in out]
    return tuple(out) if cured else None


def _blamed(words: Sequence[str], block: str) -> tuple[int, int]:
    if typed := re.search(r"^    set by: (.*) \(command line\)$", block, re.MULTILINE):
        return (words.index(typed[1]), 1) if typed[1] in words else (len(words), 0)
    for at in range(len(words)):
        for taken in range(1, len(words) - at + 1):
            if block.strip().startswith(f"{' '.join(words[at : at + taken])}: "):
                return at, taken
    flag = next((w for w in words if block.strip().startswith(f"{w.partition('=')[0]}")), None)
    if flag is not None and flag.startswith("-"):
        return words.index(flag), 1
    return len(words), 0


def composed(words: Sequence[str]) -> dict[str, Any]:
    args = parse(words)
    return compose(args.overrides, config_dir=args.config_dir).data


def refused(words: Sequence[str]) -> str:
    """Return the reason why ``words`` would be refused, or ""."""
    try:
        check_words(words)
    except RequestError as error:
        return str(error)
    return ""
