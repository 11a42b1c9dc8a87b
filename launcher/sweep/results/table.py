"""Formats a table for a terminal; if there is no room, less important columns are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

WIDTH = 100
LONGEST = 24
"""The maximum number of characters in a table cell."""
DIGITS = 8
"""The maximum number of characters of a number that is not rounded."""


def lines(columns: Mapping[str, Sequence[str]], width: int = WIDTH) -> Iterator[str]:
    """The lines of a table. ``columns`` by header, the most important first; empty ones are left out.

    >>> for line in lines({"cell": ["0", "1"], "lr": ["0.1", "0.01"], "none": ["", ""]}): print(line)
      cell  lr
      0     0.1
      1     0.01
    >>> for line in lines({"cell": ["0"], "metric": ["1.5"]}, width=8): print(line)
      cell
      0
    """
    shown: dict[str, list[str]] = {}
    used = 0
    for head, cells in columns.items():
        texts = [short(text) for text in (head, *cells)]
        wide = 2 + max(map(len, texts))
        if any(cells) and used + wide <= width:
            shown[head] = [f"{text:<{wide - 2}}" for text in texts]
            used += wide
    for row in zip(*shown.values(), strict=True):
        yield ("  " + "  ".join(row)).rstrip()


def figure(value: object) -> str:
    """
    >>> figure(0.000123456), figure(12345.6), figure(3), figure(None)
    ('0.0001235', '12346', '3', '')
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def short(text: str) -> str:
    """
    >>> short("0.07963234721775597"), short("1f1b"), short("a_very_long_name_of_a_recipe")
    ('0.07963', '1f1b', 'a_very_long_name_of_a...')
    """
    if len(text) > DIGITS:
        with suppress(ValueError):
            return f"{float(text):.4g}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def number(name: str) -> str:
    """The number of the cell with this ``name``."""
    return name.partition("-")[0]
