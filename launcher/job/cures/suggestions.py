"""Finds the valid key or option that an unknown one was meant to be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from launcher.job.cures.synonyms import OTHERS, UNLIKE
from launcher.job.schema import schema_keys
from launcher.job.schema.similar_names import did_you_mean, nearest

GENERIC = ("path", "dir", "name", "root", "format", "cache", "weights", "config", "size", "every", "steps")
"""Names that mean another thing in each section."""


def choice(word: object, names: Sequence[str], title: str) -> str:
    """The end of an error text about an unknown ``word``: the most similar name, and all of them."""
    return f"{did_you_mean(nearest(word, names))} ({title}: {', '.join(names)})"


def key(parts: Sequence[str], bad: int, data: Any) -> str | None:
    """A valid key in place of ``parts``, whose part ``bad`` is unknown; ``None`` if none or several would do.

    Without ``data``, keys of every model, data set, optimizer and step count as valid.
    """
    leaf = parts[-1].lower().replace("-", "_")
    if bad == len(parts) - 1 and leaf in UNLIKE:
        return None
    every = dict.fromkeys(schema_keys.everywhere())
    valid = [k for k in every if not data or schema_keys.at(k.split("."), data) is not None]

    # what other programs call it
    ours = next((k for k, names in OTHERS.items() if leaf in names and k in valid), None)
    if ours is not None:
        return ours

    # the same name further down in its section, else a similar one beside it
    below = [k for k in valid if bad == len(parts) - 1 > 0 and k.startswith(f"{'.'.join(parts[:bad])}.")]
    if len(deeper := [k for k in below if _leaf(k) == leaf]) == 1:
        return deeper[0]
    above = ".".join(parts[:bad])
    similar = nearest(parts[bad], [_leaf(k) for k in valid if k.rpartition(".")[0] == above])
    meant = ".".join((*parts[:bad], similar, *parts[bad + 1 :])) if similar else ""
    if meant in valid:
        return meant

    # the same name in another section, or a similar one, but none of a section of another kind
    sections = {v.partition(".")[0] for v in valid}
    valid = [k for k in valid if _may_be_meant(parts, k, sections)]
    same = [k for k in valid if _leaf(k) == leaf]
    if same:
        return _only(parts, same)
    if ".".join(parts) in every:  # of another option than the one chosen: spelt as it should be
        return None
    inside = parts[0] if len(parts) > 1 and any(k.startswith(f"{parts[0]}.") for k in valid) else ""
    valid = [k for k in valid if k.startswith(f"{inside}.")] if inside else valid
    near = nearest(leaf, {_leaf(k) for k in valid}, 0.75)
    return _only(parts, [k for k in valid if _leaf(k) == near])


def _may_be_meant(parts: Sequence[str], key: str, sections: Collection[str]) -> bool:
    """Whether ``key`` may be meant by ``parts``, which name a section of their own that there is.

    A key of another section is, where it is as near to the top: train.lr is optim.lr, and checkpoint.dir is
    not logger.trackio.dir.
    """
    own = len(parts) > 1 and parts[0] in sections
    moves = key.count(".") < len(parts) and parts[-1] not in GENERIC
    return not own or key.startswith(f"{parts[0]}.") or moves


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _only(parts: Sequence[str], keys: Sequence[str]) -> str | None:
    """The one of ``keys`` that ``parts`` can mean: the most similar, for a bare name the least deep."""
    if len(keys) == 1:
        return keys[0]
    if len(parts) > 1:
        return nearest(".".join(parts), keys)
    depth = min((k.count(".") for k in keys), default=0)
    highest = [k for k in keys if k.count(".") == depth]
    return highest[0] if len(highest) == 1 else None


def why_not(name: str) -> str:
    """Why a setting of other programs has no counterpart here; "" for any other name."""
    return UNLIKE.get(name.lower().replace("-", "_"), "")
