"""Formats rows as a text table."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Returns ``rows`` as aligned text without trailing spaces; columns in ``right`` are right-aligned.

    >>> print(table(["name", "bytes"], [["a.weight", "12"], ["b", "4096"]], right=[1]))
    name      bytes
    a.weight     12
    b          4096
    """
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    sides = [">" if i in right else "<" for i in range(len(head))]
    lines = ("  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)) for row in every)
    return "\n".join(line.rstrip() for line in lines)
