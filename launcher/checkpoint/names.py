"""Names of tensors as another program has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Table = Mapping[str, str | None]


@dataclass(frozen=True)
class Renamed:
    """``names`` are by old name; ``dropped`` the table leaves out, ``unmatched`` no row of it is about."""

    names: Mapping[str, str]
    dropped: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()


def renamed(names: Iterable[str], table: Table | None, *, strict: bool = True) -> Renamed:
    """The first row that matches decides. Without a table every name stays.

    Raises ``ValueError`` for a bad table, for two names that become one, with ``strict`` for unmatched names too.

    A key that starts with ``^`` is a regular expression for the whole name, its value may use ``\\1``. Any other is a
    module, whose name is replaced in front of what follows: ``""`` is all modules, as a value it takes the key away.
    A value of ``None`` leaves the tensor out.

    >>> table = {"rotary": None, r"^model\\.layers\\.(\\d+)\\.(.+)": r"layers.\\1.\\2", "model": ""}
    >>> renamed(["model.layers.3.w", "model.norm.w", "rotary.freq", "lm_head.w"], table, strict=False)
    Renamed(names={'model.layers.3.w': 'layers.3.w', 'model.norm.w': 'norm.w'}, \
dropped=('rotary.freq',), unmatched=('lm_head.w',))
    """
    rows = {"": ""} if table is None else table
    out: dict[str, str] = {}
    dropped, unmatched = [], []
    patterns = {key: _pattern(key) for key in rows}
    for name in names:
        key = next((key for key, pattern in patterns.items() if pattern.fullmatch(name)), None)
        if key is None:
            unmatched.append(name)
        elif (value := rows[key]) is None:
            dropped.append(name)
        else:
            out[name] = _replaced(name, key, patterns[key], value)
    _check(out)
    if strict and unmatched:
        told = f"no row of the table is about {', '.join(unmatched)}"
        raise ValueError(f"names: {told}; add rows, with null to leave a tensor out, or strict: false")
    return Renamed(out, tuple(dropped), tuple(unmatched))


def _pattern(key: str) -> re.Pattern[str]:
    if not key.startswith("^"):
        return re.compile(rf"{re.escape(key)}(\.(?P<rest>.+))?" if key else "(?P<rest>.+)", re.DOTALL)
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


def _check(names: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    found = []
    for old, new in names.items():
        if new in seen:
            found.append(f"names: {seen[new]} and {old} would both be {new}")
        seen.setdefault(new, old)
    if found:
        raise ValueError("\n".join(found))
