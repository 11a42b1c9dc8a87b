"""Shortens the rows of a plan until it fits in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.values.text import many

REST = "show=plan-full"
CUT = " ..."


@dataclass(frozen=True)
class PageRow:
    """A row of a page: its wrapped ``lines``. A row that ``stays`` is shortened or left out last."""

    lines: tuple[str, ...]
    stays: bool = False


def shares(lengths: Mapping[str, int], least: Mapping[str, int], most: int) -> dict[str, int]:
    """Divides ``most`` lines among sections: each gets its ``least``, then one more each in turn.

    Sections come, and are served, in the order of ``least``; none gets more than in ``lengths``.

    >>> shares({"a": 9, "b": 2, "c": 9}, {"a": 1, "b": 3, "c": 2}, 8)
    {'a': 3, 'b': 2, 'c': 3}
    """
    granted = {label: min(n, lengths[label]) for label, n in least.items() if label in lengths}
    remaining = most - sum(granted.values())
    while remaining > 0 and (hungry := [label for label, n in granted.items() if n < lengths[label]]):
        served = hungry[:remaining]
        granted |= {label: granted[label] + 1 for label in served}
        remaining -= len(served)
    return granted


def shortened(rows: Sequence[PageRow], room: int, width: int) -> list[str]:
    """Returns at most ``room`` lines of at most ``width`` characters, and says how many rows are missing.

    >>> print(*shortened([PageRow((f"rank {r}",)) for r in range(9)], 4, 40), sep="\\n")
    rank 0
    rank 1
    ... 6 rows more: show=plan-full
    rank 8
    """
    if sum(len(row.lines) for row in rows) <= room:
        return [line for row in rows for line in row.lines]
    line_counts = _granted(rows, room)
    if all(line_counts):
        return [line for row, n in zip(rows, line_counts, strict=True) for line in _cut(row, n, width)]

    # With a single line, its end says how many rows are missing; otherwise a separate line does, where the
    # first missing row would be.
    if room == 1:
        at = line_counts.index(1)
        return [_ending(rows[at].lines[0], f"{CUT} {_more(len(rows) - 1)}", width)]
    line_counts = _granted(rows, room - 1)
    out = [line for row, n in zip(rows, line_counts, strict=True) for line in _cut(row, n, width)]
    out.insert(sum(line_counts[: line_counts.index(0)]), f"... {_more(line_counts.count(0))}")
    return out


def _more(rows: int) -> str:
    return f"{many(rows, 'row')} more: {REST}"


def _granted(rows: Sequence[PageRow], room: int) -> list[int]:
    """Returns how many lines each row gets; rows that stay are served before all others.

    Rows get their first line from both ends of the page inwards; then they get their other lines.
    """
    inwards = sorted(range(len(rows)), key=lambda i: (min(i, len(rows) - 1 - i), i))
    line_counts = [0] * len(rows)
    for stays in (True, False):
        mine = [i for i in inwards if rows[i].stays == stays and rows[i].lines]
        for i in mine[:room]:
            line_counts[i] = 1
        room -= len(mine[:room])
        for i in mine:
            more = min(room, len(rows[i].lines) - 1)
            line_counts[i] += more
            room -= more
    return line_counts


def _cut(row: PageRow, n: int, width: int) -> list[str]:
    """Returns the first ``n`` lines of ``row``; if there are more, the last of them ends in ``CUT``."""
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
