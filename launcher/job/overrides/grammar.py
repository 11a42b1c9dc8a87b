"""What the command line asks: overrides, read by Hydra's own grammar."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as Parsed
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from launcher.errors import Problem
from launcher.job.overrides import intended_value
from launcher.job.schema import schema_keys
from launcher.job.schema.redact import text as redacted

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
    except (HydraException, ValueError, RecursionError) as error:
        found.append(_unreadable(text, str(error)))
        return
    if not open_key:
        key = parsed.key_or_group
    if problem := _refused(key, text, parsed):
        found.append(problem)
        return
    yield Override(key, parsed.value(), text, parsed.is_delete(), parsed.is_add() or parsed.is_force_add())


def parsable(text: str) -> bool:
    """Whether the grammar can read an override."""
    try:
        parse(text)
    except (HydraException, ValueError, RecursionError):  # ValueError: a number of more than 4300 digits
        return False
    return True


def rewritten(text: str) -> str:
    """An override whose value is written in Python's, JSON's or YAML's way, in the grammar's; "" when it is in none."""
    name, _, value = text.partition("=")
    inner = value.strip()
    if inner.startswith("=") and parsable(fixed := f"{name.strip()}{inner}"):
        return fixed
    if inner[:1] not in ("[", "{", "(") or len(inner) > 2000:
        return ""
    data = _literal(inner)
    if not isinstance(data, dict | list | tuple):
        return ""
    fixed = f"{name.strip()}={written(_pythonic(data))}"
    return fixed if parsable(fixed) else ""


def _literal(text: str) -> Any:
    """What ``text`` is in Python, JSON or YAML; ``None`` when it is nothing there."""
    for read in (ast.literal_eval, yaml.safe_load):
        try:
            return read(text)
        except (SyntaxError, yaml.YAMLError, RecursionError, ValueError, MemoryError):
            continue
    return None


def _pythonic(data: Any) -> Any:
    """None, True and False are texts to YAML."""
    if isinstance(data, dict):
        return {k: _pythonic(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_pythonic(v) for v in data]
    return {"None": None, "True": True, "False": False}.get(data, data) if isinstance(data, str) else data


def _refused(key: str, text: str, parsed: Parsed) -> Problem | None:
    shown = redacted(text)
    if parsed.is_sweep_override():
        values = parsed.get_value_string()
        cure = _one_value(key, values) or f"-m {shell(shown)}"
        return Problem(key, f"{values}: has several values; a sweep needs -m", cure if shown == text else "")
    if parsed.package is not None:
        return Problem("", f"{shown}: '@' is not supported here", paste(key, parsed.value()), (text,))
    if parsed.is_hydra_override() or key == "hydra":
        return Problem(
            key, "Hydra's own settings have no effect here; run_dir sets the folder, --config-dir adds options"
        )
    return None


def _one_value(key: str, values: str) -> str:
    """What several values are one of: a list where a list is wanted, a number in groups of three digits."""
    note = schema_keys.anywhere(key)
    items = [v.strip() for v in values.split(",")]
    if key == "steps":
        return paste(key, items)
    good = next(intended_value.readings(key, note, values), None) if note is not None else None
    return paste(key, good) if isinstance(good, list | int | float) else ""


def _unreadable(text: str, why: str) -> Problem:
    """What the grammar could not read, and the same override with its value in the grammar's form, or quoted."""
    name, equals, value = text.partition("=")
    shown = redacted(text)
    key = name.strip().lstrip("+~")
    if not equals:
        return Problem("", f"{shown}: not an override; write key=value", "", (text,))
    fixed = f"{name.strip()}={QuotedString(value.strip(), Quote.single).with_quotes()}"
    if not parsable(fixed):
        return Problem("", f"{shown}: cannot be read; {name!r} is no key", "", (text,))
    told = redacted(value) if shown == text else "***"
    told = told if len(told) <= 60 else told[:57] + "..."
    if re.search(r"\d{4301}", value):
        return Problem(key, f"{told}: a number of {len(value)} digits")
    if node := next((n for n in OPEN if key == n), None):
        return Problem(key, f"{told}: cannot be read; name by name any name can be written", _by_name(node, value))
    if better := rewritten(text):
        how = "write key=value" if value.startswith("=") else "lists are [a,b], groups of keys {a: 1}"
        return Problem(key, f"{told}: cannot be read; {how}", shell(better))
    if value.lstrip()[:1] in ("{", "["):  # as text it would be no group of keys
        return Problem(key, f"{told}: cannot be read; {_reason(why)}")
    return Problem(key, f"{told}: cannot be read; quote the value", shell(fixed) if shown == text else "")


def _reason(why: str) -> str:
    """What the grammar says, where that can be understood."""
    first = " ".join(why.partition("\nSee ")[0].split())
    return "brackets do not match, or a name is not of letters, digits and '_'" if "input" in first else first


def _by_name(node: str, value: str) -> str:
    """``{head[a]: 1}`` of an open node as ``node.head[a]=1``."""
    data = _literal(value)
    if not isinstance(data, dict) or redacted(value) != value:
        return ""
    return " ".join(paste(f"{node}.{name}", _pythonic(entry)) for name, entry in data.items())
