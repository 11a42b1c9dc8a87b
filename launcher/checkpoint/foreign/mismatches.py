"""What keeps another program's tensors from becoming a model's: names, shapes, dtypes, with the way out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from launcher.checkpoint.foreign.cast import castable
from launcher.checkpoint.foreign.rename import Renamed, attempted, both, renamed
from launcher.checkpoint.foreign.rename_tables import FROM_LLAMA, NameTable, to_ours
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.tensorfile.blob import described
from launcher.errors import Problem, printable
from launcher.plan.values.facts import TensorSpec

SHOWN = 6


def strange(
    key: str,
    src: object,
    specs: Mapping[str, TensorSpec],
    names: NameTable,
    target: Strategy,
    *,
    strict: bool,
) -> list[Problem]:
    """All that keeps the tensors ``specs`` of ``src`` from becoming ``target`` under the table ``names``.

    ``key`` is that of the step whose settings are to blame, ``target`` the model; of a tied tensor any name
    will do.
    """
    try:
        new = attempted(specs, to_ours(names))
    except ValueError as error:
        return [Problem(f"{key}.names", str(error).removeprefix("names: "))]
    found = [
        *_doubled(key, new, names),
        *(_unmatched(key, src, new, target) if strict else ()),
        *(_unknown(key, src, new, names, target) if strict else ()),
        *_missing(key, src, new, names, target),
    ]
    return [
        *found,
        *(_idle(key, src, new, names) if found and strict else ()),
        *_unlike(key, src, specs, new, target),
    ]


def _row(key: str, names: NameTable, row: str) -> str:
    """The key of a row; of a table that the user did not write, of the table."""
    return f"{key}.names.{row}" if isinstance(names, Mapping) else f"{key}.names"


def _doubled(key: str, new: Renamed, names: NameTable) -> Iterator[Problem]:
    for name, olds in new.doubled.items():
        yield Problem(
            _row(key, names, new.rows[olds[-1]]), f"{both(olds, name)}; null leaves one of them out"
        )


def _unmatched(key: str, src: object, new: Renamed, target: Strategy) -> Iterator[Problem]:
    if new.unmatched:
        told = f"no row of the table is about {few(new.unmatched)} of {src}"
        text = f"{told}; add rows, with null to leave a tensor out"
        yield Problem(f"{key}.names", text, _another(key, new, target) or f"{key}.strict=false")


def _unknown(key: str, src: object, new: Renamed, names: NameTable, target: Strategy) -> Iterator[Problem]:
    rows: dict[str, list[str]] = {}
    for old, name in new.names.items():
        if name not in target.named:
            rows.setdefault(_row(key, names, new.rows[old]), []).append(name)
    for row, found in rows.items():
        text = f"{src}: the model has no place for {few(found)}"
        if isinstance(names, Mapping):
            yield Problem(row, f"{text}; null in the place of this row's name leaves them out")
        elif _gaps(new, target):
            yield Problem(row, f"{text}; {_way(new, target)}", _another(key, new, target))
        else:
            yield Problem(row, f"{text}; null in a table of names leaves them out", f"{key}.strict=false")


def _missing(key: str, src: object, new: Renamed, names: NameTable, target: Strategy) -> Iterator[Problem]:
    if not (gaps := _gaps(new, target)):
        return
    unknown = [n for n in new.names.values() if n not in target.named]
    why = (
        _way(new, target)
        if unknown or new.unmatched
        else "the sizes of the model must be those of the source"
    )
    yield Problem(
        f"{key}.names",
        f"{src}: nothing is there for the model's {few(gaps)}; {why}",
        _another(key, new, target),
    )


def _gaps(new: Renamed, target: Strategy) -> list[str]:
    given = {*new.names.values()}
    return [n for n, e in target.entries.items() if not {n, *e.aliases} & given]


def _way(new: Renamed, target: Strategy) -> str:
    if _are_ours(new, target):
        return "these are the model's own names, which need no table"
    if _is_llama(new, target):
        return "these are a Llama's names as transformers has them"
    return "names is a table {theirs: ours} that brings them together"


def _another(key: str, new: Renamed, target: Strategy) -> str:
    """The override that brings them together, if a table of ours does, or none."""
    if _are_ours(new, target):
        return f"{key}.names=null"
    return f"{key}.names=llama" if _is_llama(new, target) else ""


def _are_ours(new: Renamed, target: Strategy) -> bool:
    """Whether it is the table that is in the way."""
    olds = {*new.names, *new.unmatched, *new.dropped}
    return bool(_gaps(new, target)) and all({n, *e.aliases} & olds for n, e in target.entries.items())


def _is_llama(new: Renamed, target: Strategy) -> bool:
    made = renamed([*new.names, *new.unmatched], FROM_LLAMA, strict=False).names.values()
    return bool({*made} & {*_gaps(new, target)})


def _idle(key: str, src: object, new: Renamed, names: NameTable) -> Iterator[Problem]:
    """Rows that should have done something. Alone they do no harm: a table may be made for several models."""
    used = {*new.rows.values()}
    for row, name in names.items() if isinstance(names, Mapping) else ():
        if row not in used and name is not None:
            yield Problem(_row(key, names, row), f"no tensor of {src} has a name that this row is about")


def _unlike(
    key: str, src: object, specs: Mapping[str, TensorSpec], new: Renamed, target: Strategy
) -> Iterator[Problem]:
    found = []
    for old, name in new.names.items():
        if (first := target.named.get(name)) is None:
            continue
        has, want = specs[old], target.entries[first].spec
        if has.shape != want.shape or (has.dtype != want.dtype and not castable(has.dtype, want.dtype)):
            found.append(f"{old} is {described(has)}, the model's {name} is {described(want)}")
    if found:
        yield Problem(f"{key}.src", f"{src}: {few(found, '; ')}")


def few(names: Collection[str], between: str = ", ") -> str:
    """The first of them, and how many more."""
    first = between.join(printable(name) for name in [*names][:SHOWN])
    return first if len(names) <= SHOWN else f"{first} and {len(names) - SHOWN} more"
