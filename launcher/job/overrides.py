"""Reads overrides of a command line."""

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
from launcher.job import intended_value
from launcher.job.schema import keys
from launcher.job.schema.redact import text as redacted

NO_EFFECT = "Hydra's own settings have no effect here"
_LOGS = "the output of every rank is in logs/ of the run folder"
_CELLS = "sweep.parallel sets how many cells of a sweep run at a time"
_SAMPLER = "sweep.sampler chooses the values that a sweep tries; sweep.sampler=tpe uses earlier results"

_INSTEAD = {
    "hydra.run.dir": "run_dir sets the folder of a run",
    "hydra.sweep.dir": "sweep_dir sets the folder of a sweep",
    "hydra.sweep.subdir": "runs of a sweep are numbered, and named by their differences",
    "hydra.job.name": "name is the name of a run",
    "hydra.job.chdir": "a run stays in the folder that it is started in",
    "hydra.mode": "-m starts a sweep",
    "hydra.searchpath": "--config-dir adds a folder of options and recipes",
    "hydra.output_subdir": "config.yaml and command.txt are in the run folder itself",
    "hydra.verbose": _LOGS,
    "hydra/job_logging": _LOGS,
    "hydra/hydra_logging": _LOGS,
    "hydra.job_logging": _LOGS,
    "hydra.hydra_logging": _LOGS,
    "hydra/launcher": f"launch=slurm submits a run to Slurm; {_CELLS}",
    "hydra.launcher": f"launch.slurm contains the options of the Slurm job; {_CELLS}",
    "hydra/sweeper": _SAMPLER,
    "hydra.sweeper": f"values to try are written at their own key, as -m optim.lr=0.1,0.01; {_SAMPLER}",
}
_OTHERWISE = "run_dir sets the folder, --config-dir adds options"

_ONE_WORD = {"hydra.run.dir": "run_dir={}", "hydra.sweep.dir": "-m sweep_dir={}", "hydra.job.name": "name={}"}
_PLAIN = r"[\w./-]+"
_PATHS = re.compile(rf"(?:file://)?({_PLAIN})", re.ASCII)


def hydra_hint(key: str, value: Any) -> tuple[str, str]:
    """Returns a sentence about Hydra's ``key``, and the override that means the same; "" if there is none."""
    known = (k for k in (*_INSTEAD, "") if not k or key == k or key.startswith((f"{k}.", f"{k}/")))
    return f"{NO_EFFECT}; {_INSTEAD.get(next(known), _OTHERWISE)}", _cure(key, value)


def _cure(key: str, value: Any) -> str:
    if isinstance(value, list) and len(value) == 1 and key == "hydra.searchpath":
        path = _PATHS.fullmatch(str(value[0]))
        return f"--config-dir {path[1]}" if path else ""
    if not isinstance(value, str) or redacted(f"{key}={value}") != f"{key}={value}":
        return ""
    if key == "hydra/launcher" and value == "submitit_slurm":
        return "launch=slurm"
    if key == "hydra.mode" and value == "MULTIRUN":
        return "-m"
    good = key in _ONE_WORD and re.fullmatch(_PLAIN, value, re.ASCII)
    return _ONE_WORD[key].format(value) if good else ""  # ${now:%Y} has no counterpart here


STAGE_CONFIG = "parallel.pipeline.stage_config"
OPERATORS = "parallel.operators"
GROUPS = "optim.groups"
OPEN = (STAGE_CONFIG, OPERATORS, GROUPS)
"""Settings whose keys are names of modules or parameters: dots and stars are part of the name."""
LISTS = ("steps", "logger")
"""Groups of which several options can be chosen, as in ``steps=[train,save]``."""
_BELOW_OPEN = re.compile(
    rf"(?:(~)|\+*)((?:{'|'.join(map(re.escape, OPEN))})\.[^=]+)((?(1)(?:=.*)?|=.*))", re.DOTALL
)


@dataclass(frozen=True)
class Override:
    """A parsed override. ``key`` has no leading ``+``; ``text`` is as typed."""

    key: str
    value: Any
    text: str
    delete: bool = False
    add: bool = False

    def __str__(self) -> str:
        return redacted(self.text)


def read(texts: Iterable[str], problems: list[Problem]) -> tuple[Override, ...]:
    """Parses overrides, in order; reports those that cannot be parsed in ``problems`` and drops them."""
    return tuple(o for t in texts for o in _read(t, problems))


def quoted(value: str) -> str:
    """Returns ``value`` as one word of the override grammar, quoted if it needs to be."""
    if re.fullmatch(r"[\w./-]+", value, re.ASCII):
        return value
    return str(QuotedString(value, Quote.single).with_quotes())


def shell(text: str) -> str:
    """Returns one argument for a shell, in the quotes that are easiest to read."""
    legible = "'" in text and not re.search(r'["$`\\!]', text)
    return f'"{text}"' if legible else shlex.quote(text)


def paste(key: str, value: Any) -> str:
    """Returns ``key=value`` ready for a shell.

    >>> print(paste("train.steps", 8), paste("name", "a b"), paste("steps", ["train", "save"]))
    train.steps=8 "name='a b'" 'steps=[train,save]'
    """
    return shell(f"{key}={written(value)}")


def written(value: Any) -> str:
    """Returns a plain value in the override grammar."""
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
    """Returns ``value`` as text: quoted if the grammar would otherwise read a number, a boolean or null."""
    word = quoted(value)
    if word != value or parse(f"x={value}").value() == value:
        return word
    return str(QuotedString(value, Quote.single).with_quotes())


def parse(text: str) -> Parsed:
    """Parses one override; raises Hydra's exception.

    The names below an open key are names of modules or parameters. Hydra's grammar refuses some of them, so
    it parses only the rest of the override.
    """
    parser = OverridesParser.create()
    match = _BELOW_OPEN.fullmatch(text)
    if match is None:
        return parser.parse_overrides([text])[0]
    sign, key, value = match.groups(default="")
    parsed = parser.parse_overrides([f"{sign}open{value}"])[0]
    parsed.key_or_group = key
    return parsed


def _read(text: str, problems: list[Problem]) -> Iterator[Override]:
    try:
        parsed = parse(text)
    except (HydraException, ValueError, RecursionError) as error:
        problems.append(_unreadable(text, str(error)))
        return

    key = parsed.key_or_group
    if problem := _unsupported(key, text, parsed):
        problems.append(problem)
        return
    added = parsed.is_add() or parsed.is_force_add()
    yield Override(key, parsed.value(), text, delete=parsed.is_delete(), add=added)


def parsable(text: str) -> bool:
    """Returns true if the grammar can parse an override."""
    try:
        parse(text)
    except (HydraException, ValueError, RecursionError):  # ValueError: a number of more than 4300 digits
        return False
    return True


def nameable(key: str) -> bool:
    """Returns true if an override can name ``key``: the grammar has no quotes for keys."""
    try:
        return bool(parse(f"~{key}").key_or_group == key)
    except (HydraException, ValueError, RecursionError):
        return False


def rewritten(text: str) -> str:
    """Rewrites a value from Python's, JSON's or YAML's notation to the grammar's; "" for any other value."""
    name, _, value = text.partition("=")
    inner = value.strip()

    # key==value
    once = f"{name.strip()}{inner}"
    if inner.startswith("=") and parsable(once):
        return once

    # a list or a group of keys
    if inner[:1] not in ("[", "{", "(") or len(inner) > 2000:
        return ""
    data = _literal(inner)
    if not isinstance(data, dict | list | tuple):
        return ""
    fixed = f"{name.strip()}={written(_python_constants(data))}"
    return fixed if parsable(fixed) else ""


def _literal(text: str) -> Any:
    """Returns the value of ``text`` in Python, JSON or YAML; ``None`` if it is valid in none of them."""
    for read in (ast.literal_eval, yaml.safe_load):
        try:
            return read(text)
        except (SyntaxError, yaml.YAMLError, RecursionError, ValueError, MemoryError):
            continue
    return None


def _python_constants(data: Any) -> Any:
    """Returns ``data`` with Python's None, True and False as values: YAML reads them as text."""
    if isinstance(data, dict):
        return {k: _python_constants(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_python_constants(v) for v in data]
    if isinstance(data, str):
        return {"None": None, "True": True, "False": False}.get(data, data)
    return data


def _unsupported(key: str, text: str, parsed: Parsed) -> Problem | None:
    """Returns the problem of an override that Hydra supports and the launcher does not.

    Returns ``None`` for others.
    """
    shown = redacted(text)
    if parsed.is_sweep_override():
        values = parsed.get_value_string()
        cure = _one_value(key, values) or f"-m {shell(shown)}"
        return Problem(key, f"{values}: has several values; a sweep needs -m", cure if shown == text else "")
    if parsed.package is not None:
        return Problem("", f"{shown}: '@' is not supported here", paste(key, parsed.value()), (text,))
    if parsed.is_hydra_override() or key == "hydra":
        why, cure = hydra_hint(key, None if parsed.is_delete() else parsed.value())
        return Problem(key, why, cure)
    return None


def _one_value(key: str, values: str) -> str:
    """Returns the override for ``a,b`` if it means one value.

    That is a list, or a number with a comma every three digits.
    """
    note = keys.any_annotation(key)
    items = [v.strip() for v in values.split(",")]
    if key in LISTS:
        return paste(key, items)
    good = next(intended_value.readings(key, note, values), None) if note is not None else None
    return paste(key, good) if isinstance(good, list | int | float) else ""


def _unreadable(text: str, why: str) -> Problem:
    """Returns the problem of an override that cannot be parsed.

    The cure has its value rewritten or quoted.
    """
    name, equals, value = text.partition("=")
    shown = redacted(text)
    key = name.strip().lstrip("+~")
    if not equals:
        return Problem("", f"{shown}: not an override; write key=value", "", (text,))
    in_quotes = f"{name.strip()}={QuotedString(value.strip(), Quote.single).with_quotes()}"
    if not parsable(in_quotes):
        return Problem("", f"{shown}: cannot be read; {name!r} is not a key", "", (text,))

    # the value is wrong; show it shortened, and not at all if it may be a secret
    safe = shown == text
    value_text = redacted(value) if safe else "***"
    value_text = value_text if len(value_text) <= 60 else value_text[:57] + "..."
    if re.search(r"\d{4301}", value):
        return Problem(key, f"{value_text}: a number of {len(value)} digits; at most 4300 are read")
    if key in OPEN:
        text = f"{value_text}: cannot be read; set each name by itself"
        return Problem(key, text, _by_name(key, value))
    better = rewritten(text)
    if better:
        how = "write key=value" if value.startswith("=") else "lists are [a,b], groups of keys {a: 1}"
        return Problem(key, f"{value_text}: cannot be read; {how}", shell(better))
    if value.lstrip()[:1] in ("{", "["):  # quoting would make it text, not a group of keys
        return Problem(key, f"{value_text}: cannot be read; {_reason(why)}")
    return Problem(key, f"{value_text}: cannot be read; quote the value", shell(in_quotes) if safe else "")


def _reason(why: str) -> str:
    """Returns the grammar's message, or plain words if it only mentions tokens."""
    first = " ".join(why.partition("\nSee ")[0].split())
    return (
        "brackets do not match, or a name is not made of letters, digits and '_'"
        if "input" in first
        else first
    )


def _by_name(node: str, value: str) -> str:
    """Rewrites ``{head[a]: 1}`` as ``node.head[a]=1``.

    Returns "" if ``value`` is not such a group, or if it contains a secret.
    """
    data = _literal(value)
    if not isinstance(data, dict) or redacted(value) != value:
        return ""
    return " ".join(paste(f"{node}.{name}", _python_constants(entry)) for name, entry in data.items())
