"""What the command line asks: overrides, read by Hydra's own grammar."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as Parsed
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from launcher.errors import Problem
from launcher.job.redact import text as redacted

OPEN = ("parallel.pipeline.stage_config", "parallel.operators")
"""Nodes whose keys are module names: dots and stars in them belong to the name."""


@dataclass(frozen=True)
class Override:
    """``key`` without a leading ``+``; ``text`` as typed."""

    key: str
    value: Any
    text: str
    delete: bool = False
    add: bool = False

    def __str__(self) -> str:
        return redacted(self.text)


def read(texts: Iterable[str], found: list[Problem]) -> tuple[Override, ...]:
    """Overrides in order; those that cannot be read are reported in ``found``."""
    return tuple(o for t in texts for o in _read(t, found))


def quoted(value: str) -> str:
    """``value`` as one word of the override grammar, whatever is in it."""
    return value if re.fullmatch(r"[\w./-]+", value, re.ASCII) else str(QuotedString(value, Quote.single).with_quotes())


def shell(text: str) -> str:
    """One argument for a shell, in the quotes that leave it legible."""
    legible = "'" in text and not re.search(r'["$`\\!]', text)
    return f'"{text}"' if legible else shlex.quote(text)


def paste(key: str, value: Any) -> str:
    """``key=value`` ready for a shell.

    >>> print(paste("train.steps", 8), paste("name", "a b"), paste("steps", ["train", "save"]))
    train.steps=8 "name='a b'" 'steps=[train,save]'
    """
    return shell(f"{key}={written(value)}")


def written(value: Any) -> str:
    """A plain value in the override grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(written, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return value if re.fullmatch(r"\$\{[\w.:]+\}", value) else _word(value)
    return str(value)


def _word(value: str) -> str:
    """Quoted also where the grammar would read a number, a boolean or null."""
    plain = quoted(value)
    if plain != value:
        return plain
    return plain if parse(f"x={value}").value() == value else str(QuotedString(value, Quote.single).with_quotes())


def parse(text: str) -> Parsed:
    """One override; raises Hydra's exception."""
    return OverridesParser.create().parse_overrides([text])[0]


def _read(text: str, found: list[Problem]) -> Iterator[Override]:
    name, equals, value = text.partition("=")
    key = name.lstrip("+")
    open_key = any(key.startswith(node + ".") for node in OPEN)
    try:
        parsed = parse(f"open={value}" if open_key and equals else text)
    except HydraException as error:
        found.append(_unreadable(text, str(error)))
        return
    if not open_key:
        key = parsed.key_or_group
    if problem := _refused(key, text, parsed):
        found.append(problem)
        return
    yield Override(key, parsed.value(), text, parsed.is_delete(), parsed.is_add() or parsed.is_force_add())


def _refused(key: str, text: str, parsed: Parsed) -> Problem | None:
    shown = redacted(text)
    if parsed.is_sweep_override():
        values = parsed.get_value_string()
        return Problem(key, f"{values}: has several values; a sweep needs -m", f"-m {shell(shown)}")
    if parsed.package is not None:
        return Problem(key, f"{shown}: '@' is not supported here", paste(key, parsed.value()))
    if parsed.is_hydra_override() or key == "hydra":
        return Problem(
            key, "Hydra's own settings have no effect here; run_dir sets the folder, --config-dir adds options"
        )
    return None


def _unreadable(text: str, why: str) -> Problem:
    """What the grammar could not read, and the same override with its value quoted where that helps."""
    name, equals, value = text.partition("=")
    shown = redacted(text)
    if not equals:
        return Problem("", f"{shown}: not an override; write key=value", f"{shell(shown)}=VALUE")
    fixed = f"{name.strip()}={QuotedString(value, Quote.single).with_quotes()}"
    try:
        parse(fixed)
    except HydraException:
        return Problem("", f"{shown}: cannot be read; {name!r} is no key")
    reason = " ".join(why.partition("\nSee ")[0].split())
    hint = "quote the value" if "Lexer" in reason or "EOF" in reason or "mismatched" in reason else reason
    told = f"{redacted(value) if shown == text else '***'}: cannot be read; {hint}"
    if value.lstrip().startswith("{"):  # as text it would be no group of keys
        return Problem(name.lstrip("+~"), f"{told}; in a recipe file any name can be written")
    return Problem(name.lstrip("+~"), told, shell(redacted(fixed)))
