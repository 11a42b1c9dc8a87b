"""Recognizes arguments that are not overrides: split by the shell, flags of other programs, bare names."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem
from launcher.job.cures import corrected_key, keys_of_other_programs
from launcher.job.overrides import parsable, rewritten, shell, written
from launcher.job.schema import keys
from launcher.job.schema.redact import text as redacted

SPACES = "the shell splits arguments at spaces; quote an argument with spaces"
NOT_ONE = "not an override; write key=value"
HELP = "python -m launcher --help lists recipes, commands and flags"
OF_FILES = ("prepare", "verify", "inspect", "transform", "merge_strategies")
"""Steps that need no model. For any other step, only a plan shows whether its files fit the model."""
RECIPE_FLAGS = ("config-name", "config", "cn", "recipe", "config-file", "cfg-file")
PLAN_FLAGS = ("dry-run", "plan", "print-plan", "dryrun")


@dataclass(frozen=True)
class KnownNames:
    """The names that a word may be: groups of options and recipes. Keys come from the schema."""

    groups: tuple[str, ...]
    recipes: tuple[str, ...]

    def key(self, word: str) -> bool:
        """Returns true if ``word`` is a key that can be set."""
        return bool(re.fullmatch(r"[a-z_][\w.]*", word)) and (word in self.groups or word in _keys())

    def meant(self, word: str) -> str | None:
        """Returns the key that ``word`` names, directly or by another name; ``None`` if it names none."""
        name = word.lstrip("-").replace("-", "_") if word.startswith("-") else word
        if self.key(name):
            return name
        if not re.fullmatch(r"[a-z_][\w.]*", name):
            return None
        return corrected_key.key(name.split("."), _first_unknown(name), {})


def _keys() -> frozenset[str]:
    return frozenset(keys.everywhere())


def _first_unknown(name: str) -> int:
    """Returns the index of the first part of an unknown key that the schema does not have."""
    parts = name.split(".")
    known = _keys()
    return next((i for i in range(len(parts)) if ".".join(parts[: i + 1]) not in known), len(parts) - 1)


def sift(texts: Sequence[str], names: KnownNames, problems: list[Problem]) -> list[str]:
    """Returns the overrides among ``texts``.

    Reports all other arguments in ``problems``, with what they may mean.
    """
    out = []
    at = 0
    while at < len(texts):
        taken, problem = _stray(texts[at:], names)
        if problem is None:
            out.append(texts[at])
        else:
            problems.append(problem)
        at += taken
    return out


def _stray(rest: Sequence[str], names: KnownNames) -> tuple[int, Problem | None]:
    """Returns the number of arguments at the start of ``rest`` that belong together.

    Also returns their problem, if any.
    """
    for recognize in (_called, _brackets, _verb, _around_equals, _listed, _several, _alone):
        match = recognize(rest, names)
        if match is not None:
            taken, text, cure = match
            return taken, Problem("", text, cure, tuple(rest[:taken]))
    return 1, None


Match = tuple[int, str, str] | None
"""The number of arguments that belong together, the message about them, and the intended override."""


def _called(rest: Sequence[str], names: KnownNames) -> Match:
    """Matches ``hsdp(shard_size=2)``, a method call as in Python."""
    call = re.fullmatch(r"([\w.]+)\((.*)\)", rest[0].strip(), re.DOTALL)
    if call is None or len(rest[0]) > 2000:
        return None
    try:
        made = ast.parse(f"call({call[2]})", mode="eval").body
        if not isinstance(made, ast.Call):
            return None
        positional = [ast.literal_eval(one) for one in made.args]
        named = {one.arg: ast.literal_eval(one.value) for one in made.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if named.keys() == {"config"}:  # comm_fusion(config={...})
        positional, named = [named["config"]], {}
    if len(positional) + bool(named) > 1 or None in named:
        return None
    value = named or (positional[0] if positional else True)
    return 1, f"{redacted(rest[0])}: {NOT_ONE}", _pasted(f"{call[1]}={written(value)}")


def _brackets(rest: Sequence[str], names: KnownNames) -> Match:
    """Matches ``steps=[train, save]``, split at spaces."""
    if _depth(rest[0]) <= 0 or "=" not in rest[0]:
        return None
    for taken in range(2, min(len(rest), 40) + 1):
        joined = " ".join(rest[:taken])
        if _depth(joined) == 0:
            return taken, f"{_shown(rest[:taken])}: {SPACES}", _pasted(joined)
    return None


def _depth(text: str) -> int:
    return sum(text.count(c) for c in "[{(") - sum(text.count(c) for c in "]})")


def _verb(rest: Sequence[str], names: KnownNames) -> Match:
    """Matches ``verify FOLDER`` and ``prepare src=FILES dst=FOLDER``: a step, its files and its settings."""
    kinds = keys.kinds(keys.at(("steps", rest[0]), {}))
    if rest[0] not in kinds:
        return None
    fields = keys.fields(kinds[rest[0]])
    places = [name for name in ("src", "dst", "path") if name in fields]
    settings = []
    for word in rest[1:]:
        name, equals, value = word.partition("=")
        field = keys_of_other_programs.step_setting(name, fields) if equals and not names.key(name) else ""
        if field:
            settings.append(_pasted(f"steps.{rest[0]}.{field}={value}"))
            places = [place for place in places if place != field]
        elif places and not equals and word[0:1] not in ("-", "~", "+") and not names.key(word):
            settings.append(_pasted(f"steps.{rest[0]}.{places.pop(0)}={word}"))
        else:
            break
    if not settings:
        return None
    taken = 1 + len(settings)
    meant = " ".join([f"'steps=[{rest[0]}]'", *settings]) if all(settings) else f"steps=[{rest[0]}]"
    cure = meant if all(settings) and rest[0] in OF_FILES else ""
    return taken, f"{_shown(rest[:taken])}: {NOT_ONE}, as in {meant}", cure


def _around_equals(rest: Sequence[str], names: KnownNames) -> Match:
    head, second, third = (*rest[:3], "", "")[:3]

    # key = value
    if names.key(head) and second == "=" and third and "=" not in third:
        return 3, f"{_shown(rest[:3])}: {SPACES}", _pasted(f"{head}={third}")

    # key =value
    if names.key(head) and second.startswith("=") and len(second) > 1:
        return 2, f"{_shown(rest[:2])}: {SPACES}", _pasted(head + second)

    # key= value
    loose = second and "=" not in second and second[0] != "-" and not names.key(second)
    if head[-1:] == "=" and names.key(head[:-1]) and loose and second not in names.recipes:
        return 2, f"{_shown(rest[:2])}: {SPACES}", _pasted(head + second)

    # key: value, and key value
    bare = head.rstrip(":")
    if names.key(bare) and second and "=" not in second and second[0] not in "-~+":
        return 2, f"{_shown(rest[:2])}: {NOT_ONE}", _pasted(f"{bare}={second}")

    # key:value
    name, colon, value = head.partition(":")
    if colon and value and "=" not in name and names.key(name):
        return 1, f"{redacted(head)}: {NOT_ONE}", _pasted(f"{name}={value}")
    return None


def _listed(rest: Sequence[str], names: KnownNames) -> Match:
    """Matches ``optim.lr=0.1, 0.2``, split at spaces."""
    if "=" not in rest[0] or not rest[0].endswith(",") or len(rest) < 2 or "=" in rest[1]:
        return None
    taken = 1
    while taken < len(rest) and rest[taken - 1].endswith(",") and "=" not in rest[taken]:
        taken += 1
    return taken, f"{_shown(rest[:taken])}: {SPACES}", _pasted("".join(rest[:taken]))


def _several(rest: Sequence[str], names: KnownNames) -> Match:
    """Matches ``'train.steps=5 seed=1'``, several overrides in one argument."""
    parts = rest[0].split()
    keyed = [p.partition("=") for p in parts]
    if len(parts) < 2 or not all(equals and names.key(name) for name, equals, _ in keyed):
        return None
    cure = " ".join(shell(redacted(p)) for p in parts) if all(map(parsable, parts)) else ""
    return 1, f"{redacted(rest[0])}: these are {len(parts)} overrides in one argument", cure


def _alone(rest: Sequence[str], names: KnownNames) -> Match:
    """Matches a word without a value: a recipe, the file of a recipe, or any other word."""
    word = rest[0]
    if "=" in word or word.startswith("~"):
        return None
    if word in names.recipes or word.endswith((".yaml", ".yml")):
        cure = shell(f"recipe={_recipe(word, names)}")
        return 1, f"{word}: not an override; a recipe is chosen with recipe=", cure
    if word in keys.kinds(keys.at(("steps", word), {})):
        return 1, f"{word}: {NOT_ONE}, as in steps=[{word}]", ""
    listed = f"python -m launcher --help {word} lists its settings" if names.key(word) else HELP
    more = f"; {listed}" if re.fullmatch(r"[a-z]+", word) else ""
    return 1, f"{redacted(word)}: {NOT_ONE}{more}", ""


def _recipe(word: str, names: KnownNames) -> str:
    """Returns the value for ``recipe=``: the name of a known recipe, otherwise the path of a file."""
    bare = word.removesuffix(".yaml")
    if word in names.recipes:
        return bare
    if Path(word).is_file():
        return word
    if bare in names.recipes:
        return bare
    return f"{word}.yaml" if Path(f"{word}.yaml").is_file() else word


def flag(word: str, after: Sequence[str], names: KnownNames) -> tuple[int, str]:
    """Returns the number of arguments ``after`` an unknown flag that are its value.

    Also returns the intended override.
    """
    name, equals, value = word.partition("=")
    follows = bool(not equals and after and "=" not in after[0] and not after[0].startswith("-"))
    if follows:
        value = after[0]

    # flags of other programs, then any key of the schema
    bare = name.lstrip("-").replace("_", "-")
    if bare in RECIPE_FLAGS and value:
        return int(follows), shell(f"recipe={_recipe(value, names)}")
    if bare in PLAN_FLAGS:
        return 0, "show=plan"
    key = names.meant(name) if value else None
    if key:
        return int(follows), _pasted(f"{key}={value}")
    return int(follows and bool(keys_of_other_programs.why_not(name))), ""


def _pasted(text: str) -> str:
    """Returns ``text`` as one shell argument, rewritten if necessary; "" if the grammar cannot read it."""
    good = text if parsable(text) else rewritten(text)
    return shell(redacted(good)) if good and redacted(good) == good else ""


def _shown(words: Sequence[str]) -> str:
    return redacted(" ".join(words))
