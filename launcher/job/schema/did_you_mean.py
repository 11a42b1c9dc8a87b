"""The name that a misspelled word means, and the text ``did you mean``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import partial

NOTHING = ("none", "null", "nil", "no", "off", "false", "never", "disable", "disabled")
"""Words that choose nothing, so they misspell no other choice."""
_HARMLESS = ("enable", "use", "set", "with", "do", "is", "num", "n", "number", "of", "the", "value")
"""Words that a name may contain besides ours without a change of its meaning."""
_NEGATIONS = ("un", "non", "in", "im", "dis", "de", "des", "a", "anti", "ab")
"""Beginnings that turn a word into its opposite, as in async and uneven."""
_NOT = ("no", "not", "non", "dont", "without", "never", "skip", "disable")
"""Words that turn the rest of a name into its opposite."""
_OPPOSITES = (
    ("nadam", "adamw"), ("adamax", "adamw"), ("mean", "median"), ("minimum", "maximum"),
    ("minimize", "maximize"), ("increase", "decrease"),
    ("include", "exclude"), ("enable", "disable"), ("attach", "detach"), ("internal", "external"),
    ("encrypt", "decrypt"), ("encode", "decode"), ("encoder", "decoder"), ("forward", "backward"),
    ("openstate", "closestate"),
)  # fmt: skip
"""Words with a similar spelling and another meaning."""


def nearest(word: object, names: Iterable[str], alike: float = 0.6) -> str | None:
    """Returns the one of ``names`` that ``word`` misspells: the most alike, and at least ``alike``.

    A misspelling changes letters. Another digit (fp128, level4), another word (gradients_sum) or a negation
    (uneven) changes the meaning.
    """
    text = str(word).lower()
    lower = {n.lower(): n for n in names}
    if text in NOTHING and text not in lower:
        return lower.get("none", lower.get("off"))
    fits = [n for n in lower if _same_numbers(text, n) and not _other_words(text, n)]
    close = get_close_matches(text, fits, 2, alike)
    if len(close) == 2 and text not in close and _ratio(text, close[0]) == _ratio(text, close[1]):
        return None
    return lower[close[0]] if close else None


def _other_words(typed: str, name: str) -> bool:
    """Returns true if ``typed`` differs from ``name`` in words, not only in letters."""
    mine, theirs = (re.findall(r"[a-z]+", text) for text in (typed, name))
    if _opposed("".join(mine), "".join(theirs)):
        return True
    if any(word in _NOT for word in mine if word not in theirs):
        return True

    # several words that are written as one, or one that is written as several
    rests = ["".join(w for w in a if w not in b) for a, b in ((mine, theirs), (theirs, mine))]
    if len(mine) != len(theirs) and all(rests) and _ratio(*rests) >= 0.85:
        return False

    # pair each word that was typed with one of the name
    unmatched, extra = list(theirs), []
    for one in mine:
        if any(_opposed(one, other) for other in unmatched):
            return True
        pairs = [other for other in unmatched if _alike(one, other)]
        if pairs:
            unmatched.remove(max(pairs, key=partial(_ratio, one)))
        else:
            extra.append(one)
    return not set(extra) <= {*_HARMLESS} or bool(extra and unmatched)


def _opposed(a: str, b: str) -> bool:
    short, long = sorted((a, b), key=len)
    negated = len(short) > 2 and any(long == f"{beginning}{short}" for beginning in _NEGATIONS)
    return negated or (a, b) in _OPPOSITES or (b, a) in _OPPOSITES


def _alike(typed: str, word: str) -> bool:
    """Returns true if ``typed`` is ``word``, a shorter form of it, or a misspelling."""
    short, long = sorted((typed, word), key=len)
    if long.startswith(short) or sorted(typed) == sorted(word):
        return True
    return len(long) > 3 and len(short) > 2 and _ratio(typed, word) >= 0.7


def did_you_mean(name: str | None, *, joint: str = ", ", shown: Callable[[str], str] = repr) -> str:
    """Returns the end of a message that suggests ``name``, formatted by ``shown``; "" if ``name`` is None.

    >>> f"unknown key{did_you_mean('steps')}"
    "unknown key, did you mean 'steps'?"
    """
    return f"{joint}did you mean {shown(name)}?" if name else ""


def unknown_choice(word: object, names: Sequence[str], title: str) -> str:
    """Returns the end of a message about an unknown ``word``: the most similar name, and all names."""
    return f"{did_you_mean(nearest(word, names))} ({title}: {', '.join(names)})"


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, b, a).ratio()  # get_close_matches compares in this order


def _same_numbers(a: str, b: str) -> bool:
    """Returns true if the digits of ``a`` and ``b`` allow for a misspelling.

    They do if one text has no digits, if both have the same digits in any order, or if the digits of ``b``
    begin with those of ``a``.
    """
    mine, theirs = ("".join(c for c in t if c.isdigit()) for t in (a, b))
    return not (mine and theirs) or sorted(mine) == sorted(theirs) or theirs.startswith(mine)
