"""Finds the valid name that a misspelt one was meant to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher, get_close_matches


def nearest(word: object, names: Iterable[str], alike: float = 0.6) -> str | None:
    """The most similar of ``names``, if it is at least ``alike`` (0 to 1) and no other is equally similar.

    Digits are never a misspelling: fp128 is not similar to fp16, nor level4 to level3.
    """
    text = str(word).lower()
    lower = {n.lower(): n for n in names}
    fits = [n for n in lower if _same_numbers(text, n)]
    found = get_close_matches(text, fits, 2, alike)
    if len(found) == 2 and text not in found and _ratio(text, found[0]) == _ratio(text, found[1]):
        return None
    return lower[found[0]] if found else None


def did_you_mean(name: str | None, *, joint: str = ", ", shown: Callable[[str], str] = repr) -> str:
    """The end of a message that suggests ``name``, formatted by ``shown``; "" if ``name`` is None.

    >>> f"unknown key{did_you_mean('steps')}"
    "unknown key, did you mean 'steps'?"
    """
    return f"{joint}did you mean {shown(name)}?" if name else ""


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, b, a).ratio()  # get_close_matches compares in this order


def _same_numbers(a: str, b: str) -> bool:
    """Whether the digits of ``a`` and ``b`` allow for a misspelling.

    They do if one has none, both have the same in any order, or one begins with all digits of the other.
    """
    mine, theirs = ("".join(c for c in t if c.isdigit()) for t in (a, b))
    same = sorted(mine) == sorted(theirs)
    return not (mine and theirs) or same or mine.startswith(theirs) or theirs.startswith(mine)
