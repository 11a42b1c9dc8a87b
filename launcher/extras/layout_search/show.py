"""The table of a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import shorten

from launcher.errors import Problem
from launcher.extras.layout_search.candidates import KEYS, LayoutCandidate
from launcher.extras.layout_search.evaluate import Predicted, SearchContext, best
from launcher.extras.layout_search.if_none_fits import RequestChange
from launcher.plan.values.note import Note
from launcher.plan.values.text import bytes_text, many, scaled, spans


@dataclass
class Ranking:
    """The ``predictions`` of the planned layouts, out of so many ``layouts``.

    ``refused``: the number of impossible layouts by reason. ``beyond``: layouts that cannot be faster than
    the best. ``too_large``: layouts whose bound exceeds the memory. ``remaining``: layouts not examined.
    """

    question: SearchContext
    layouts: int
    predictions: list[Predicted] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    too_large: list[tuple[float, LayoutCandidate]] = field(default_factory=list)
    beyond: int = 0
    remaining: int = 0

    @property
    def best(self) -> list[Predicted]:
        return best(self.predictions, self.question.room)

    @property
    def front(self) -> list[Predicted]:
        """Predictions that no other beats in both seconds and bytes, fastest first."""
        out: list[Predicted] = []
        for one in self.best:
            if not out or one.nbytes < out[-1].nbytes:
                out.append(one)
        return out


SHOWN = 10
"""Rows of the table of layouts."""
OTHERS = 3
"""Other values of a setting that a note compares with."""
REASONS = 5
WIDTH = 90
"""Characters of a reason."""


def text(ranking: Ranking) -> Iterator[str]:
    """Yields a table of the best layouts, the front of time against memory, and what was left out."""
    best = ranking.best[:SHOWN]
    cluster = ranking.question.speeds.cluster.name or "the cluster"
    yield f"search over {ranking.layouts:,} layouts on {cluster}, predicted"
    rows: list[tuple[str, ...]] = [("", "time", f"{best[0].unit}/s", "MFU", "memory", "layout", "slower by")]
    rows += [_row(n, one, best[0]) for n, one in enumerate(best, 1)]
    yield from _table(rows)
    if any(one.between for one in best):
        yield "  * interpolated between plans that recompute no blocks and all blocks"
    leaner = [f"{took(p.seconds)} in {bytes_text(p.nbytes)}" for p in ranking.front[:SHOWN]]
    yield f"  front      {', '.join(leaner)}"
    yield from (f"  {'chosen' if not n else '':<10} {note}" for n, note in enumerate(notes(ranking)))
    yield from _counted(ranking)


def _row(n: int, one: Predicted, first: Predicted) -> tuple[str, ...]:
    number, prefix = scaled(one.count / one.seconds)
    star = "*" if one.between else ""
    cells = (f"{star}{n}", took(one.seconds), f"{number}{prefix}", f"{one.mfu:.1%}", bytes_text(one.nbytes))
    return (*cells, layout(one), _slower(one, first))


def layout(one: Predicted) -> str:
    """Returns a layout in few words; omits what it does not use."""
    candidate = one.layout
    words = [f"tp {candidate.tp} {candidate.operators}"] if candidate.tp > 1 else []
    if candidate.stages > 1:
        chunks = f" x {candidate.chunks}" if candidate.chunks > 1 else ""
        words.append(f"{candidate.stages}{chunks} stages {candidate.scheduler}")
    words.append(f"{candidate.micros} x {candidate.micro}")
    if candidate.hsdp is not None:
        words.append(f"{candidate.hsdp.optimizer_level} {candidate.hsdp.shard_size} of {candidate.replicas}")
    elif candidate.replicas > 1:
        words.append(f"{candidate.replicas} copies")
    if one.again:
        words.append(f"{one.again:.0%} recomputed, {one.policy}")
    return ", ".join(words)


def _slower(one: Predicted, first: Predicted) -> str:
    """Returns the term that slows it down most, with its total difference from the first in percent."""
    before = dict(first.terms)
    name, more = max(((name, took - before[name]) for name, took in one.terms), key=lambda term: term[1])
    if one is first or more <= 0:
        return ""
    return f"{one.seconds / first.seconds - 1:.1%}: {name}"


def took(seconds: float) -> str:
    """
    >>> took(20.704), took(0.01234)
    ('20.70 s', '12.34 ms')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        right_aligned = [f"{cell:>{w}}" for cell, w in zip(row[:5], widths[:5], strict=True)]
        yield f"  {'  '.join(right_aligned)}  {row[5]:<{widths[5]}}  {row[6]}".rstrip()


def notes(ranking: Ranking, taken: Predicted | None = None) -> Iterator[Note]:
    """Notes the value of each setting that was left open, and the seconds with the next best values.

    ``taken``: the chosen layout, if it is not the first.
    """
    best = ranking.best
    first = taken or best[0]
    for name in _searched(ranking):
        chosen = first.layout.shown()[name]
        others: dict[str, float] = {}
        for one in best:
            others.setdefault(one.layout.shown()[name], one.seconds)
        others.pop(chosen)
        text = f"auto -> {_value(name, first)}: {took(first.seconds)} a step"
        compared = [f"{took(seconds)} with {value}" for value, seconds in list(others.items())[:OTHERS]]
        if compared:
            text = f"{text}, {', '.join(compared)}"
        else:
            text = f"{text}; layouts with other values do not fit, or cannot be faster"
        yield Note(KEYS[name], text)


def _value(name: str, one: Predicted) -> str:
    if name == "recompute":
        return f"{one.again:.0%} of the blocks, {one.policy}" if one.again else "null"
    return one.layout.shown()[name]


def _searched(ranking: Ranking) -> Iterator[str]:
    """Yields the names of the fields that the request leaves open."""
    over = ranking.question.job.search.over
    for name, key in KEYS.items():
        below = key if name != "chunks" else "parallel.pipeline.interleave"
        if any(k in (key, below) or k.startswith(f"{key}.") for k in over):
            yield name


def _counted(ranking: Ranking) -> Iterator[str]:
    parts = [f"{len(ranking.predictions):,} planned"]
    if ranking.beyond:
        parts.append(f"{ranking.beyond:,} cannot be faster by 1%")
    if ranking.too_large:
        parts.append(f"{len(ranking.too_large):,} need too much memory")
    if ranking.remaining:
        parts.append(f"{ranking.remaining:,} not examined")
    yield f"  examined   {ranking.layouts:,}: {', '.join(parts)}"
    for why, n in ranking.refused.most_common(REASONS):
        yield f"             {n:,} cannot be planned: {shorten(why, WIDTH, placeholder=' ...')}"


OWN = ("model", "data", "loss", "metrics", "optim")
"""Sections whose problems no other layout solves."""


def nothing(ranking: Ranking, other: tuple[RequestChange, int] | None = None) -> Problem:
    """Returns why there is no layout: none fits, or none is possible.

    ``other``: a single change and its bytes.
    """
    over = ranking.question.job.search.over
    key, shown = next(iter(over), "show"), "auto" if over else "nothing to search"
    if not ranking.predictions:
        # a problem of the model or the data occurs in most layouts; other problems are those of layouts
        often = next((text for text, _ in ranking.refused.most_common(1)), "")
        section, _, wrong = often.partition(": ")
        if section.partition(".")[0] in OWN:
            return Problem(section, f"{wrong}; none of {many(ranking.layouts, 'layout')} can be planned")
        why = "; ".join(f"{n:,} x {text}" for text, n in ranking.refused.most_common(REASONS))
        return Problem(key, f"{shown}: none of {many(ranking.layouts, 'layout')} can be planned: {why}")
    assert ranking.question.room is not None
    least = min(ranking.predictions, key=lambda one: (one.nbytes, one.layout.order))
    alone = len(least.ranks) == 1
    who = f"rank{'' if alone else 's'} {spans(least.ranks)}"
    needs = f"{bytes_text(least.nbytes)} of {bytes_text(ranking.question.room)} on {who}"
    text = f"{shown}: none of {many(ranking.layouts, 'layout')} fits; the smallest planned one needs {needs}"
    text = f"{text}: {layout(least)}"
    if other is None or other[1] >= least.nbytes:
        return Problem(key, text)
    change, nbytes = other
    text = f"{text}; the single change {change.words} helps most: {bytes_text(nbytes)}"
    return Problem(key, text, change.words if nbytes <= ranking.question.room else "")
