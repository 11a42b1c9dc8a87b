"""Which name was meant: the nearest valid one, and the key that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from launcher.job import surface


def nearest(word: object, names: Iterable[str], alike: float = 0.6) -> str | None:
    """The most similar of ``names``, if any is at least ``alike`` (0 to 1)."""
    lower = {n.lower(): n for n in names}
    found = get_close_matches(str(word).lower(), lower, 1, alike)
    return lower[found[0]] if found else None


def choice(word: object, names: Sequence[str], title: str) -> str:
    """``did you mean`` and the list of what there is."""
    hint = nearest(word, names)
    return (f", did you mean {hint!r}?" if hint else "") + f" ({title}: {', '.join(names)})"


def key(parts: Sequence[str], bad: int, data: Any) -> str | None:
    """A valid key instead of ``parts``, whose part ``bad`` is unknown: a similar name, else the same leaf elsewhere."""
    similar = nearest(parts[bad], surface.names(parts[:bad], data))
    if similar and surface.at(meant := (*parts[:bad], similar, *parts[bad + 1 :]), data) is not None:
        return ".".join(meant)
    valid = dict.fromkeys(k for k in surface.everywhere() if surface.at(k.split("."), data) is not None)
    same_leaf = [k for k in valid if k.rpartition(".")[2] == parts[-1]]
    if same_leaf:
        return nearest(".".join(parts), same_leaf) or same_leaf[0]
    leaf = nearest(parts[-1], {k.rpartition(".")[2] for k in valid})
    return nearest(".".join(parts), [k for k in valid if k.rpartition(".")[2] == leaf])
