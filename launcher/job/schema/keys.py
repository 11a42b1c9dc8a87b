"""The keys of the schema, and the names that are spelled like another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from launcher.job.schema.job import Job


def fields(cls: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a class by the name that a user writes."""
    return {f.alias or n: f for n, f in cls.model_fields.items()}


def typed(field: FieldInfo) -> Any:
    """The annotation of a field, including its constraints."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def kinds(note: Any) -> dict[str, type[BaseModel]]:
    """The members of a tagged union by tag; empty if ``note`` is anything else."""
    members = {}
    for member in _members(note):
        tag = next((m.tag for m in getattr(member, "__metadata__", ()) if isinstance(m, Tag)), None)
        if tag is not None:
            members[tag] = get_args(member)[0]
    return members


def settings(note: Any, value: Any) -> type[BaseModel] | None:
    """The settings class for ``value`` at a key of type ``note``; ``None`` for a plain value."""
    tagged = kinds(note)
    if tagged:
        chooser = next((m for m in note.__metadata__ if isinstance(m, Discriminator)), None)
        tag = chooser.discriminator(value) if chooser and callable(chooser.discriminator) else None
        return tagged.get(tag) if isinstance(tag, str) else None
    classes = [c for c in map(_bare, _members(note)) if isinstance(c, type) and issubclass(c, BaseModel)]
    return classes[0] if classes else None


def below(note: Any, name: str, value: Any) -> Any:
    """The annotation of key ``name`` in a node of type ``note`` with ``value``; ``None`` if it has none."""
    cls = settings(note, value)
    if cls:
        field = fields(cls).get(name)
        return typed(field) if field else None
    return next((get_args(m)[1] for m in map(_bare, _members(note)) if get_origin(m) is dict), None)


def at(parts: Sequence[str], data: Any) -> Any:
    """The annotation of a key, given as its parts, in ``data``; ``None`` if the schema has no such key."""
    note: Any = Job
    for part in parts:
        if note is None:
            return None
        note = below(note, part, data)
        data = data.get(part) if isinstance(data, dict) else None
    return note


def field_at(parts: Sequence[str], data: Any) -> FieldInfo | None:
    """The field of a key, with its default and description."""
    above = at(parts[:-1], data)
    for part in parts[:-1]:
        data = data.get(part) if isinstance(data, dict) else None
    cls = settings(above, data) if above is not None else None
    return fields(cls).get(parts[-1]) if cls else None


def names(parts: Sequence[str], data: Any) -> tuple[str, ...]:
    """Every name that may be set below a key; empty for an open node or a plain value."""
    note = at(parts, data)
    for part in parts:
        data = data.get(part) if isinstance(data, dict) else None
    cls = settings(note, data) if note is not None else None
    return tuple(fields(cls)) if cls else ()


def everywhere(note: Any = Job, above: str = "") -> Iterator[str]:
    """Yields every dotted key of the schema; keys repeat if several members of a union have them."""
    yield from (key for key, _ in noted(note, above))


def any_annotation(key: str) -> Any:
    """The annotation of a key that any model, data set, optimizer or step has; ``None`` if none has it."""
    return next((note for name, note in noted() if name == key), None)


def noted(note: Any = Job, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every dotted key with its annotation, for each member of a union."""
    for cls in kinds(note).values() or [c for c in [settings(note, None)] if c]:
        for name, field in fields(cls).items():
            key = f"{above}.{name}" if above else name
            yield key, typed(field)
            yield from noted(typed(field), key)


def accepts(note: Any, value: Any) -> bool:
    """Whether ``value`` is valid at a key of type ``note``."""
    try:
        TypeAdapter(note).validate_python(value)
    except ValidationError:
        return False
    return True


def literals(note: Any) -> tuple[Any, ...]:
    """The words that a key accepts; empty if it accepts none."""
    return tuple(v for m in map(_bare, _members(note)) if get_origin(m) is Literal for v in get_args(m))


def _members(note: Any) -> tuple[Any, ...]:
    bare = _bare(note)
    if get_origin(bare) in (Union, UnionType):
        return tuple(m for m in get_args(bare) if m is not NoneType)
    return (note,)


def _bare(note: Any) -> Any:
    return get_args(note)[0] if get_origin(note) is Annotated else note


NOTHING = ("none", "null", "nil", "no", "off", "false", "never", "disable", "disabled")
"""Words that choose nothing, and that are therefore no misspelling of a choice."""
_HARMLESS = ("enable", "use", "set", "with", "do", "is", "num", "n", "number", "of", "the", "value")
"""Words that a name may have besides those of ours without a change of its meaning."""
_NEGATIONS = ("un", "non", "in", "im", "dis", "de", "des", "a", "anti", "ab")
"""Beginnings that turn a word into its opposite, as in async and uneven."""
_NOT = ("no", "not", "non", "dont", "without", "never", "skip", "disable")
"""Words that turn the rest of a name into its opposite."""
_OPPOSITES = (
    ("nadam", "adamw"), ("adamax", "adamw"), ("mean", "median"), ("minimum", "maximum"),
    ("minimize", "maximize"), ("increase", "decrease"),
    ("include", "exclude"), ("enable", "disable"), ("attach", "detach"), ("internal", "external"),
    ("encrypt", "decrypt"), ("encode", "decode"), ("encoder", "decoder"), ("forward", "backward"),
    ("openstate", "closestate"),
)  # fmt: skip
"""Words that are spelled alike and mean something else."""


def nearest(word: object, names: Iterable[str], alike: float = 0.6) -> str | None:
    """The one of ``names`` that ``word`` misspells: at least ``alike`` (0 to 1), and more so than the others.

    A misspelling changes letters. Another digit (fp128, level4), another word (gradients_sum) or a negation
    (uneven) changes the meaning.
    """
    text = str(word).lower()
    lower = {n.lower(): n for n in names}
    if text in NOTHING and text not in lower:
        return lower.get("none", lower.get("off"))
    fits = [n for n in lower if _same_numbers(text, n) and not _other_words(text, n)]
    close = get_close_matches(text, fits, 2, alike)
    if len(close) == 2 and text not in close and _ratio(text, close[0]) == _ratio(text, close[1]):
        return None
    return lower[close[0]] if close else None


def _other_words(typed: str, name: str) -> bool:
    """Whether ``typed`` differs from ``name`` in words, not only in letters."""
    mine, theirs = (re.findall(r"[a-z]+", text) for text in (typed, name))
    if _opposed("".join(mine), "".join(theirs)):
        return True
    if any(word in _NOT for word in mine if word not in theirs):
        return True

    # words that are written as one, or one as several
    rests = ["".join(w for w in a if w not in b) for a, b in ((mine, theirs), (theirs, mine))]
    if len(mine) != len(theirs) and all(rests) and _ratio(*rests) >= 0.85:
        return False

    # pair each word that was typed with one of the name
    unmatched, extra = list(theirs), []
    for one in mine:
        if any(_opposed(one, other) for other in unmatched):
            return True
        pairs = [other for other in unmatched if _alike(one, other)]
        if pairs:
            unmatched.remove(max(pairs, key=partial(_ratio, one)))
        else:
            extra.append(one)
    return not set(extra) <= {*_HARMLESS} or bool(extra and unmatched)


def _opposed(a: str, b: str) -> bool:
    short, long = sorted((a, b), key=len)
    negated = len(short) > 2 and any(long == f"{beginning}{short}" for beginning in _NEGATIONS)
    return negated or (a, b) in _OPPOSITES or (b, a) in _OPPOSITES


def _alike(typed: str, word: str) -> bool:
    """Whether ``typed`` is ``word``, a shorter form of it, or a misspelling."""
    short, long = sorted((typed, word), key=len)
    if long.startswith(short) or sorted(typed) == sorted(word):
        return True
    return len(long) > 3 and len(short) > 2 and _ratio(typed, word) >= 0.7


def did_you_mean(name: str | None, *, joint: str = ", ", shown: Callable[[str], str] = repr) -> str:
    """The end of a message that suggests ``name``, formatted by ``shown``; "" if ``name`` is None.

    >>> f"unknown key{did_you_mean('steps')}"
    "unknown key, did you mean 'steps'?"
    """
    return f"{joint}did you mean {shown(name)}?" if name else ""


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, b, a).ratio()  # get_close_matches compares in this order


def _same_numbers(a: str, b: str) -> bool:
    """Whether the digits of ``a`` and ``b`` allow for a misspelling.

    They do if one has none, both have the same in any order, or ``b`` begins with all digits of ``a``.
    """
    mine, theirs = ("".join(c for c in t if c.isdigit()) for t in (a, b))
    return not (mine and theirs) or sorted(mine) == sorted(theirs) or theirs.startswith(mine)
