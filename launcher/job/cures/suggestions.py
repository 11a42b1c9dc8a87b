"""Finds the valid key or option that an unknown one was probably meant to be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from launcher.job.cures.synonyms import OTHERS, UNLIKE
from launcher.job.schema import schema_keys
from launcher.job.schema.similar_names import did_you_mean, nearest

GENERIC = ("path", "dir", "name", "root", "format", "cache", "weights", "config", "size", "every", "steps")
"""Names with different meanings in different sections."""


def choice(word: object, names: Sequence[str], title: str) -> str:
    """The end of a message about an unknown ``word``: the most similar name, and all names."""
    return f"{did_you_mean(nearest(word, names))} ({title}: {', '.join(names)})"


def key(parts: Sequence[str], bad: int, data: Any) -> str | None:
    """A valid key in place of ``parts``, whose part ``bad`` is unknown; ``None`` if none or several match.

    Without ``data``, the keys of every model, data set, optimizer and step are valid.
    """
    leaf = parts[-1].lower().replace("-", "_")
    if bad == len(parts) - 1 and leaf in UNLIKE:
        return None
    every = dict.fromkeys(schema_keys.everywhere())
    valid = [k for k in every if not data or schema_keys.at(k.split("."), data) is not None]

    # a name that other programs use
    ours = next((k for k, names in OTHERS.items() if leaf in names and k in valid), None)
    if ours is not None:
        return ours

    # the same name deeper in its section, else a similar one beside it
    below = [k for k in valid if bad == len(parts) - 1 > 0 and k.startswith(f"{'.'.join(parts[:bad])}.")]
    if len(deeper := [k for k in below if _leaf(k) == leaf]) == 1:
        return deeper[0]
    above = ".".join(parts[:bad])
    similar = nearest(parts[bad], [_leaf(k) for k in valid if k.rpartition(".")[0] == above])
    meant = ".".join((*parts[:bad], similar, *parts[bad + 1 :])) if similar else ""
    if meant in valid:
        return meant

    # the same or a similar name in another section, but not in a section of another kind
    sections = {v.partition(".")[0] for v in valid}
    valid = [k for k in valid if _may_be_meant(parts, k, sections)]
    same = [k for k in valid if _leaf(k) == leaf]
    if same:
        return _only(parts, same)
    if ".".join(parts) in every:  # spelt right, but it belongs to an option that is not chosen
        return None
    inside = parts[0] if len(parts) > 1 and any(k.startswith(f"{parts[0]}.") for k in valid) else ""
    valid = [k for k in valid if k.startswith(f"{inside}.")] if inside else valid
    near = nearest(leaf, {_leaf(k) for k in valid}, 0.75)
    return _only(parts, [k for k in valid if _leaf(k) == near])


def _may_be_meant(parts: Sequence[str], key: str, sections: Collection[str]) -> bool:
    """Whether ``key`` may be meant by ``parts``, which begin with an existing section.

    A key of another section may be if it is not deeper: train.lr means optim.lr, but checkpoint.dir does not
    mean logger.trackio.dir.
    """
    own = len(parts) > 1 and parts[0] in sections
    moves = key.count(".") < len(parts) and parts[-1] not in GENERIC
    return not own or key.startswith(f"{parts[0]}.") or moves


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _only(parts: Sequence[str], keys: Sequence[str]) -> str | None:
    """The one of ``keys`` that ``parts`` may mean: the most similar, or for a bare name the shallowest."""
    if len(keys) == 1:
        return keys[0]
    if len(parts) > 1:
        return nearest(".".join(parts), keys)
    depth = min((k.count(".") for k in keys), default=0)
    highest = [k for k in keys if k.count(".") == depth]
    return highest[0] if len(highest) == 1 else None


def why_not(name: str) -> str:
    """Why a setting of other programs does not exist here; "" for any other name."""
    return UNLIKE.get(name.lower().replace("-", "_"), "")
