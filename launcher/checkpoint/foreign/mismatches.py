"""What keeps another program's tensors from becoming a model's: names, shapes, dtypes, with the way out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

from launcher.checkpoint.foreign.cast import castable
from launcher.checkpoint.foreign.rename import Renamed, attempted, both
from launcher.checkpoint.foreign.rename_tables import FROM_LLAMA, NameTable, to_ours
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.tensorfile.blob import described
from launcher.errors import Problem, printable
from launcher.plan.values.facts import TensorSpec

SHOWN = 6
TRIED = 10_000
"""Names that are tried as a Llama's: no Llama has more."""


@dataclass(frozen=True)
class _Attempt:
    """The tensors of ``src``, renamed by the table ``names``, for the model ``target``.

    ``key`` is that of the step whose settings are to blame.
    """

    key: str
    src: object
    names: NameTable
    target: Strategy
    new: Renamed

    @cached_property
    def gaps(self) -> list[str]:
        """The tensors of the model that nothing is there for."""
        given = {*self.new.names.values()}
        return [n for n, e in self.target.entries.items() if not {n, *e.aliases} & given]

    @cached_property
    def are_ours(self) -> bool:
        """Whether it is the table that is in the way."""
        olds = {*self.new.names, *self.new.unmatched, *self.new.dropped}
        return bool(self.gaps) and all({n, *e.aliases} & olds for n, e in self.target.entries.items())

    @cached_property
    def is_llama(self) -> bool:
        olds = islice(chain(self.new.names, self.new.unmatched), TRIED)
        made = attempted(olds, FROM_LLAMA).names.values()
        return bool({*made} & {*self.gaps})

    @property
    def way(self) -> str:
        """What to do about the names, in words."""
        if self.are_ours:
            return "these are the model's own names, which need no table"
        if self.is_llama:
            return "these are a Llama's names as transformers has them"
        return "names is a table {theirs: ours} that brings them together"

    @property
    def override(self) -> str:
        """What brings them together, if a table of ours does, or none."""
        if self.are_ours:
            return f"{self.key}.names=null"
        return f"{self.key}.names=llama" if self.is_llama else ""

    def row(self, name: str) -> str:
        """The key of a row; of a table that the user did not write, of the table."""
        return f"{self.key}.names.{name}" if isinstance(self.names, Mapping) else f"{self.key}.names"


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

    # names first: rows that do nothing are told only when something else is wrong
    attempt = _Attempt(key, src, names=names, target=target, new=new)
    problems = [*_doubled(attempt)]
    if strict:
        problems += [*_unmatched(attempt), *_unknown(attempt)]
    problems += _missing(attempt)
    if problems and strict:
        problems += _idle(attempt)
    return [*problems, *_unlike(attempt, specs)]


def _doubled(attempt: _Attempt) -> Iterator[Problem]:
    for name, olds in attempt.new.doubled.items():
        row = attempt.row(attempt.new.rows[olds[-1]])
        yield Problem(row, f"{both(olds, name)}; null leaves one of them out")


def _unmatched(attempt: _Attempt) -> Iterator[Problem]:
    key = attempt.key
    unmatched = attempt.new.unmatched
    if unmatched:
        told = f"no row of the table is about {few(unmatched)} of {attempt.src}"
        text = f"{told}; add rows, with null to leave a tensor out"
        yield Problem(f"{key}.names", text, attempt.override or f"{key}.strict=false")


def _unknown(attempt: _Attempt) -> Iterator[Problem]:
    rows: dict[str, list[str]] = {}
    for old, name in attempt.new.names.items():
        if name not in attempt.target.named:
            rows.setdefault(attempt.row(attempt.new.rows[old]), []).append(name)

    for row, found in rows.items():
        text = f"{attempt.src}: the model has no place for {few(found)}"
        if isinstance(attempt.names, Mapping):
            yield Problem(row, f"{text}; null in the place of this row's name leaves them out")
        elif attempt.gaps:
            yield Problem(row, f"{text}; {attempt.way}", attempt.override)
        else:
            out = f"{attempt.key}.strict=false"
            yield Problem(row, f"{text}; null in a table of names leaves them out", out)


def _missing(attempt: _Attempt) -> Iterator[Problem]:
    if not attempt.gaps:
        return
    why = "the sizes of the model must be those of the source"
    unknown = any(name not in attempt.target.named for name in attempt.new.names.values())
    if unknown or attempt.new.unmatched:
        why = attempt.way
    text = f"{attempt.src}: nothing is there for the model's {few(attempt.gaps)}; {why}"
    yield Problem(f"{attempt.key}.names", text, attempt.override)


def _idle(attempt: _Attempt) -> Iterator[Problem]:
    """Rows that should have done something. Alone they do no harm: a table may be made for several models."""
    if not isinstance(attempt.names, Mapping):
        return
    used = {*attempt.new.rows.values()}
    for row, name in attempt.names.items():
        if row not in used and name is not None:
            yield Problem(attempt.row(row), f"no tensor of {attempt.src} has a name that this row is about")


def _unlike(attempt: _Attempt, specs: Mapping[str, TensorSpec]) -> Iterator[Problem]:
    found = []
    for old, name in attempt.new.names.items():
        first = attempt.target.named.get(name)
        if first is None:
            continue
        has = specs[old]
        want = attempt.target.entries[first].spec
        if has.shape != want.shape or (has.dtype != want.dtype and not castable(has.dtype, want.dtype)):
            found.append(f"{old} is {described(has)}, the model's {name} is {described(want)}")
    if found:
        yield Problem(f"{attempt.key}.src", f"{attempt.src}: {few(found, '; ')}")


def few(names: Collection[str], between: str = ", ") -> str:
    """The first of them, and how many more."""
    first = between.join(printable(name) for name in [*names][:SHOWN])
    return first if len(names) <= SHOWN else f"{first} and {len(names) - SHOWN} more"
