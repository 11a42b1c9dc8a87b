"""Numbers, lists and rows as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GB = 1 << 30


def many(n: int, noun: str) -> str:
    """
    >>> many(1, "micro batch"), many(4, "micro batch"), many(0, "step"), many(2, "epoch")
    ('1 micro batch', '4 micro batches', '0 steps', '2 epochs')
    """
    if n == 1:
        return f"{n} {noun}"
    ending = "es" if noun.endswith(("nch", "tch")) else "s"
    return f"{n} {noun}{ending}"


def scaled(n: float) -> tuple[str, str]:
    """Returns ``n`` as a number below 1000, and the prefix for its unit.

    >>> scaled(950), scaled(1_234_567)
    (('950', ''), ('1.2', 'M'))
    """
    for prefix in ("", "k", "M", "G", "T"):
        if n < 1000:
            return (f"{n:.1f}" if prefix else f"{n:.0f}"), prefix
        n /= 1000
    return f"{n:.1f}", "P"


def bytes_text(n: float) -> str:
    """Formats a number of bytes.

    >>> bytes_text(1536), bytes_text(3 * 1024**3)
    ('1.5 KB', '3.0 GB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TB"


def seconds_text(n: float) -> str:
    """
    >>> seconds_text(12.34), seconds_text(0.0021), seconds_text(0.00006)
    ('12.3 s', '2.1 ms', '60.0 us')
    """
    if n >= 1:
        return f"{n:.1f} s"
    return f"{n * 1e3:.1f} ms" if n >= 1e-3 else f"{n * 1e6:.1f} us"


def spans(numbers: Sequence[int]) -> str:
    """Lists ascending numbers, with consecutive ones as a range.

    >>> spans((0, 1, 2, 5)), spans((4,))
    ('0-2,5', '4')
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def some(names: Sequence[str]) -> str:
    """Lists the first three names, and how many more there are.

    >>> some(["a", "b"]), some(["a", "b", "c", "d"])
    ('a, b', 'a, b, c and 1 more')
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def listed(names: Sequence[str]) -> str:
    """Lists module names, with consecutive numbers as a range and without the middle of a long list.

    >>> listed(("embed", "layers.0", "layers.1", "layers.2", "norm"))
    'embed, layers.0 .. layers.2, norm'
    """
    runs: list[tuple[str, str]] = []
    for name in names:
        if runs and _follows(runs[-1][1], name):
            runs[-1] = (runs[-1][0], name)
        else:
            runs.append((name, name))
    words = [a if a == b else f"{a} .. {b}" for a, b in runs]
    return ", ".join(words if len(words) <= 8 else [*words[:4], "..", *words[-3:]])


def _follows(name: str, other: str) -> bool:
    """Whether ``other`` is ``name`` with the next number at its end.

    >>> _follows("layers.9", "layers.10"), _follows("layer9", "layer10"), _follows("a.1", "b.2")
    (True, False, False)
    """
    (above, _, a), (around, _, b) = name.rpartition("."), other.rpartition(".")
    return above == around and a.isdecimal() and b.isdecimal() and int(b) == int(a) + 1


REST = "show=plan-full"
CUT = " ..."


@dataclass(frozen=True)
class Row:
    """A row of a page: its wrapped ``lines``. A row that ``stays`` is shortened or left out last."""

    lines: tuple[str, ...]
    stays: bool = False


def shares(wanted: Mapping[str, int], least: Mapping[str, int], most: int) -> dict[str, int]:
    """Divides ``most`` lines among sections: each gets its ``least``, then one more each in turn.

    Sections come, and are served, in the order of ``least``; none gets more lines than it ``wanted``.

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
    """Returns at most ``room`` lines of at most ``width`` characters, and says how many rows are missing.

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

    # With a single line, its end says how many rows are missing; otherwise a separate line does, where the
    # first missing row would be.
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
    """Returns how many lines each row gets; rows that stay are served before all others.

    Rows get their first line from both ends of the page inwards; then they get their other lines.
    """
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
    """The first ``n`` lines of ``row``; if there are more, the last of them ends in ``CUT``."""
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
