"""Names of tensors as another program has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Table = Mapping[str, str | None]


@dataclass(frozen=True)
class Renamed:
    """``names`` are by old name; ``dropped`` the table leaves out, ``unmatched`` no row of it is about.

    ``rows`` are the keys of the rows that decided, by old name.
    """

    names: Mapping[str, str]
    dropped: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    rows: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def doubled(self) -> dict[str, tuple[str, ...]]:
        """The old names of each new name that has several."""
        olds: dict[str, list[str]] = {}
        for old, new in self.names.items():
            olds.setdefault(new, []).append(old)
        return {new: tuple(names) for new, names in olds.items() if len(names) > 1}


def renamed(names: Iterable[str], table: Table | None, *, strict: bool = True) -> Renamed:
    """The first row that matches decides. Without a table every name stays.

    Raises ``ValueError`` for a bad table, for two names that become one, with ``strict`` for unmatched names
    too.

    A key that starts with ``^`` is a regular expression for the whole name, its value may use ``\\1``. Any
    other is a module, whose name is replaced in front of what follows: ``""`` is all modules, as a value it
    takes the key away. A value of ``None`` leaves the tensor out.

    >>> table = {"rotary": None, r"^model\\.layers\\.(\\d+)\\.(.+)": r"layers.\\1.\\2", "model": ""}
    >>> new = renamed(["model.layers.3.w", "model.norm.w", "rotary.freq", "lm_head.w"], table, strict=False)
    >>> new.names
    {'model.layers.3.w': 'layers.3.w', 'model.norm.w': 'norm.w'}
    >>> new.dropped, new.unmatched
    (('rotary.freq',), ('lm_head.w',))
    """
    new = attempted(names, table)
    found = [f"names: {told}" for told in map(both, new.doubled.values(), new.doubled)]
    if strict and new.unmatched:
        told = f"no row of the table is about {', '.join(new.unmatched)}"
        found.append(f"names: {told}; add rows, with null to leave a tensor out, or strict: false")
    if found:
        raise ValueError("\n".join(found))
    return new


def attempted(names: Iterable[str], table: Table | None) -> Renamed:
    """As ``renamed``, which raises for two names that become one: here that is for the caller to see."""
    rows = {"": ""} if table is None else table
    patterns = {key: _pattern(key) for key in rows}

    out: dict[str, str] = {}
    dropped: list[str] = []
    unmatched: list[str] = []
    decided: dict[str, str] = {}
    for name in names:
        key = next((key for key, pattern in patterns.items() if pattern.fullmatch(name)), None)
        if key is None:
            unmatched.append(name)
            continue
        decided[name] = key
        value = rows[key]
        if value is None:
            dropped.append(name)
        else:
            out[name] = _replaced(name, key, patterns[key], value)
    return Renamed(out, tuple(dropped), tuple(unmatched), decided)


def both(olds: Sequence[str], new: str) -> str:
    """What to say of several names that become one."""
    word = "both" if len(olds) == 2 else "all"
    return f"{', '.join(olds[:-1])} and {olds[-1]} would {word} be {new}"


def _pattern(key: str) -> re.Pattern[str]:
    if not key:
        return re.compile("(?P<rest>.+)", re.DOTALL)
    if not key.startswith("^"):
        return re.compile(rf"{re.escape(key)}(\.(?P<rest>.+))?", re.DOTALL)
    try:
        return re.compile(key)
    except re.error as error:
        raise ValueError(f"names: {key} is no regular expression: {error}") from error


def _replaced(name: str, key: str, pattern: re.Pattern[str], value: str) -> str:
    match = pattern.fullmatch(name)
    assert match is not None
    if not key.startswith("^"):
        new = ".".join(filter(None, (value, match["rest"])))
    else:
        try:
            new = match.expand(value)
        except (re.error, IndexError) as error:
            raise ValueError(f"names: {key}: {value} does not fit it: {error}") from error
    if not new:
        raise ValueError(f"names: {key}: {name} is left without a name")
    return new
