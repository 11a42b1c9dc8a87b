"""Names that are nearly the same: the one that was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


def nearest(word: object, names: Iterable[str], alike: float = 0.6) -> str | None:
    """The most similar of ``names``, if any is at least ``alike`` (0 to 1) and no other is as similar.

    Numbers in names are no matter of spelling: fp128 is not nearly fp16, and level4 is no level.
    """
    text = str(word).lower()
    lower = {n.lower(): n for n in names}
    fits = [n for n in lower if _same_numbers(text, n)]
    found = get_close_matches(text, fits, 2, alike)
    if len(found) == 2 and text not in found and _ratio(text, found[0]) == _ratio(text, found[1]):
        return None
    return lower[found[0]] if found else None


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, b, a).ratio()  # as get_close_matches compares


def _same_numbers(a: str, b: str) -> bool:
    """One of them has no digits, or the same in another order, or those of the other and more."""
    mine, theirs = ("".join(c for c in t if c.isdigit()) for t in (a, b))
    same = sorted(mine) == sorted(theirs)
    return not (mine and theirs) or same or mine.startswith(theirs) or theirs.startswith(mine)
