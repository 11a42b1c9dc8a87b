"""Makes the scripts of ``--completion``: fills the words into a template per shell."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.job.completion import words

HERE = Path(__file__).parent


def script(shell: str, first: Sequence[str]) -> str:
    """The completion script for ``shell``. ``first``: words before a folder, which are not settings."""
    values = words.values()
    known = {
        "FIRST": _joined(first),
        "FLAGS": _joined(words.flags()),
        "KEYS": _joined(words.keys(values)),
        "VALUES": "\n".join(f"        {row}" for row in _ROWS[shell](values)),
    }
    text = (HERE / f"launcher.{shell}").read_text(encoding="utf-8")
    for name, listed in known.items():
        text = text.replace(f"@{name}@", listed)
    return text


def _case(values: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{key}) echo {_joined(listed)} ;;" for key, listed in values.items()]


def _switch(values: Mapping[str, Sequence[str]]) -> list[str]:
    split = "\n            string split ' ' "
    return [f"case {key}{split}{shlex.quote(' '.join(listed))}" for key, listed in values.items()]


_ROWS: dict[str, Callable[[Mapping[str, Sequence[str]]], list[str]]] = {
    "bash": _case,
    "zsh": _case,
    "fish": _switch,
}


def _joined(listed: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, listed))
