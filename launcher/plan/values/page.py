"""Rows as the lines of a short page: of what has no room, the first and the last ones stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.values.text import many

REST = "show=plan-full"
CUT = " ..."


@dataclass(frozen=True)
class Row:
    """``lines``: its text, wrapped. What ``stays`` is left out last, and cut last."""

    lines: tuple[str, ...]
    stays: bool = False


def shares(wanted: Mapping[str, int], least: Mapping[str, int], most: int) -> dict[str, int]:
    """Of ``most`` lines those of each section: its ``least``, then one more each as long as there are any.

    Sections are named, and served, in the order of ``least``; none gets more than is ``wanted``.

    >>> shares({"a": 9, "b": 2, "c": 9}, {"a": 1, "b": 3, "c": 2}, 8)
    {'a': 3, 'b': 2, 'c': 3}
    """
    given = {label: min(n, wanted[label]) for label, n in least.items() if label in wanted}
    left = most - sum(given.values())
    while left > 0 and (hungry := [label for label, n in given.items() if n < wanted[label]]):
        served = hungry[:left]
        given |= {label: given[label] + 1 for label in served}
        left -= len(served)
    return given


def shortened(rows: Sequence[Row], room: int, width: int) -> list[str]:
    """``rows`` on so many lines of this width, and how many of them are missing.

    >>> print(*shortened([Row((f"rank {r}",)) for r in range(9)], 4, 40), sep="\\n")
    rank 0
    rank 1
    ... 6 rows more: show=plan-full
    rank 8
    """
    if sum(len(row.lines) for row in rows) <= room:
        return [line for row in rows for line in row.lines]
    given = _granted(rows, room)
    if all(given):
        return [line for row, n in zip(rows, given, strict=True) for line in _cut(row, n, width)]

    # of one line its end says so, elsewhere a line of its own where the first are missing
    if room == 1:
        at = given.index(1)
        return [_ending(rows[at].lines[0], f"{CUT} {_more(len(rows) - 1)}", width)]
    given = _granted(rows, room - 1)
    out = [line for row, n in zip(rows, given, strict=True) for line in _cut(row, n, width)]
    out.insert(sum(given[: given.index(0)]), f"... {_more(given.count(0))}")
    return out


def _more(rows: int) -> str:
    return f"{many(rows, 'row')} more: {REST}"


def _granted(rows: Sequence[Row], room: int) -> list[int]:
    """Lines of each row: the first from both ends inwards, then the others; of what stays before the rest."""
    inwards = sorted(range(len(rows)), key=lambda i: (min(i, len(rows) - 1 - i), i))
    given = [0] * len(rows)
    for stays in (True, False):
        mine = [i for i in inwards if rows[i].stays == stays and rows[i].lines]
        for i in mine[:room]:
            given[i] = 1
        room -= len(mine[:room])
        for i in mine:
            more = min(room, len(rows[i].lines) - 1)
            given[i] += more
            room -= more
    return given


def _cut(row: Row, n: int, width: int) -> list[str]:
    """Its first ``n`` lines, the last one of them with a sign that there are more."""
    lines = list(row.lines[:n])
    if 0 < n < len(row.lines):
        lines[-1] = _ending(lines[-1], CUT, width)
    return lines


def _ending(line: str, end: str, width: int) -> str:
    """
    >>> _ending("one, two, three", " ...", 13)
    'one, two ...'
    """
    while line and len(line) + len(end) > width:
        line = line.rpartition(" ")[0].rstrip()
    return line.rstrip(" ,;:") + end
