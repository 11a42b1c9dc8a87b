"""Finds mismatches of names, shapes and dtypes between another program's tensors and a model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from shlex import quote

from launcher.checkpoint.cast import castable
from launcher.checkpoint.foreign.names import FROM_LLAMA, NameTable, Renamed, attempted, both, to_ours
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.tensorfile.safetensors import described
from launcher.errors import Problem, printable
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.untrusted.files import without_collection

SHOWN = 6
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
TRIED = 10_000
"""The most names that are tried as Llama names; no Llama has more."""


@dataclass(frozen=True)
class _Attempt:
    """An import of the tensors of ``src`` into the model ``target``, renamed by the table ``names``.

    ``key`` is the settings key of the step that imports. ``new`` is the result of renaming.
    """

    key: str
    src: object
    names: NameTable
    target: Strategy
    new: Renamed

    @cached_property
    def gaps(self) -> list[str]:
        """The model's tensors that the source does not have."""
        provided = {*self.new.names.values()}
        return [n for n, e in self.target.entries.items() if not {n, *e.aliases} & provided]

    @cached_property
    def are_ours(self) -> bool:
        """True if the source has the model's own names, so that the table is the mistake."""
        olds = {*self.new.names, *self.new.unmatched, *self.new.dropped}
        return bool(self.gaps) and all({n, *e.aliases} & olds for n, e in self.target.entries.items())

    @cached_property
    def is_llama(self) -> bool:
        olds = islice(chain(self.new.names, self.new.unmatched), TRIED)
        made = attempted(olds, FROM_LLAMA).names.values()
        return bool({*made} & {*self.gaps})

    @cached_property
    def wrapper(self) -> dict[str, str | None]:
        """The table of names that unwraps ``{"model": ..., "optim": ...}``; empty without such a wrapper.

        One top-level key holds all of the model's own names. The table removes this key from the names, and
        drops the tensors of the other keys.
        """
        heads = Counter(old.partition(".")[0] for old in self.new.names)
        if self.names is not None or len(heads) > SHOWN or not all(map(_WORD.fullmatch, heads)):
            return {}
        for head in heads:
            below = {old.removeprefix(f"{head}.") for old in self.new.names if old.startswith(f"{head}.")}
            if all({n, *e.aliases} & below for n, e in self.target.entries.items()):
                return {head: "", **dict.fromkeys(h for h in heads if h != head)}
        return {}

    @property
    def way(self) -> str:
        """A clause on how to make the names match."""
        if self.are_ours:
            return "these are the model's own names, which need no table"
        if self.is_llama:
            return "these are Llama names as transformers writes them"
        if self.wrapper:
            return f"they are below {next(iter(self.wrapper))!r}, a prefix that a table of names removes"
        return "map them with names, a table {theirs: ours}"

    @property
    def override(self) -> str:
        """The override that makes the names match, if one is known; else empty."""
        if self.are_ours:
            return f"{self.key}.names=null"
        if self.is_llama:
            return f"{self.key}.names=llama"
        rows = (f"{head}:{json.dumps(ours)}" for head, ours in self.wrapper.items())
        return quote(f"{self.key}.names={{{','.join(rows)}}}") if self.wrapper else ""

    def row(self, name: str) -> str:
        """Returns the settings key of a row, or the key of ``names`` if the table is not the user's."""
        return f"{self.key}.names.{name}" if isinstance(self.names, Mapping) else f"{self.key}.names"


@without_collection()
def problems(
    key: str,
    src: object,
    specs: Mapping[str, TensorSpec],
    names: NameTable,
    target: Strategy,
    *,
    strict: bool,
) -> list[Problem]:
    """Returns the problems of importing the tensors ``specs`` of ``src`` into the model ``target``.

    ``key`` is the settings key of the step that imports, ``names`` its table. A tied tensor may have any of
    its names. Names that match no row, or that the model does not have, are problems only if ``strict``.
    """
    try:
        new = attempted(specs, to_ours(names))
    except ValueError as error:
        return [Problem(f"{key}.names", str(error).removeprefix("names: "))]

    # names first; unused rows are reported only if there is another problem
    attempt = _Attempt(key, src, names=names, target=target, new=new)
    out = [*_doubled(attempt)]
    if strict:
        out += [*_unmatched(attempt), *_unknown(attempt)]
    out += _missing(attempt)
    if out and strict:
        out += _idle(attempt)
    return [*out, *_unlike(attempt, specs)]


def _doubled(attempt: _Attempt) -> Iterator[Problem]:
    for name, olds in attempt.new.doubled.items():
        row = attempt.row(attempt.new.rows[olds[-1]])
        yield Problem(row, f"{both(olds, name)}; set one to null to leave it out")


def _unmatched(attempt: _Attempt) -> Iterator[Problem]:
    key = attempt.key
    unmatched = attempt.new.unmatched
    if unmatched:
        reason = f"no row of the table matches {few(unmatched)} of {attempt.src}"
        text = f"{reason}; add rows, with null to leave a tensor out"
        yield Problem(f"{key}.names", text, attempt.override or f"{key}.strict=false")


def _unknown(attempt: _Attempt) -> Iterator[Problem]:
    unknown: dict[str, list[str]] = {}
    named, of_row = attempt.target.named, attempt.new.rows
    for old, name in attempt.new.names.items():
        if name not in named:
            unknown.setdefault(of_row[old], []).append(name)
    rows: dict[str, list[str]] = {}
    for row, names in unknown.items():
        rows.setdefault(attempt.row(row), []).extend(names)

    for row, names in rows.items():
        text = f"{attempt.src}: the model has no place for {few(names)}"
        if isinstance(attempt.names, Mapping):
            yield Problem(row, f"{text}; set this row to null to leave them out")
        elif attempt.gaps:
            yield Problem(row, f"{text}; {attempt.way}", attempt.override)
        else:
            out = f"{attempt.key}.strict=false"
            yield Problem(row, f"{text}; null in a table of names leaves them out", out)


def _missing(attempt: _Attempt) -> Iterator[Problem]:
    if not attempt.gaps:
        return
    why = "the model must have the sizes of the source"
    unknown = any(name not in attempt.target.named for name in attempt.new.names.values())
    if unknown or attempt.new.unmatched:
        why = attempt.way
    text = f"{attempt.src}: it has no tensor for the model's {few(attempt.gaps)}; {why}"
    yield Problem(f"{attempt.key}.names", text, attempt.override)


def _idle(attempt: _Attempt) -> Iterator[Problem]:
    """Yields rows that match no tensor. They alone are no problem: a table may serve several models."""
    if not isinstance(attempt.names, Mapping):
        return
    used = {*attempt.new.rows.values()}
    for row, name in attempt.names.items():
        if row not in used and name is not None:
            yield Problem(attempt.row(row), f"this row matches no tensor of {attempt.src}")


def _unlike(attempt: _Attempt, specs: Mapping[str, TensorSpec]) -> Iterator[Problem]:
    texts = []
    for old, name in attempt.new.names.items():
        first = attempt.target.named.get(name)
        if first is None:
            continue
        actual = specs[old]
        expected = attempt.target.entries[first].spec
        if actual.shape != expected.shape or (
            actual.dtype != expected.dtype and not castable(actual.dtype, expected.dtype)
        ):
            texts.append(f"{old} is {described(actual)}, the model's {name} is {described(expected)}")
    if texts:
        yield Problem(f"{attempt.key}.src", f"{attempt.src}: {few(texts, '; ')}")


def few(names: Collection[str], between: str = ", ") -> str:
    """Returns the first names as text, with the number of the others."""
    first = between.join(printable(name) for name in [*names][:SHOWN])
    return first if len(names) <= SHOWN else f"{first} and {len(names) - SHOWN} more"
