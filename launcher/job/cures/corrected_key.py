"""The key that a misspelled or negated one means."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from launcher.job.cures.keys_of_other_programs import NOT_NEGATED, UNSUPPORTED, our_key, step_setting
from launcher.job.overrides import OPEN
from launcher.job.schema import keys as schema_keys
from launcher.job.schema.did_you_mean import nearest

NEGATED = re.compile(r"\A((disable|no|not|non|dont|without|never|skip)[_-]|disabled?\Z)")
"""Matches the beginning of negated names (disable_x, no_x), and the key ``disabled`` of a section."""
GENERIC = ("path", "dir", "name", "root", "format", "cache", "weights", "config", "size", "every", "steps")
"""Names with different meanings in different sections."""


def key(parts: Sequence[str], bad: int, data: Any) -> str | None:
    """Returns a valid key in place of ``parts``, whose part ``bad`` is unknown.

    Returns ``None`` if none or several match. Without ``data``, the keys of every model, data set, optimizer
    and step are valid.
    """
    leaf = parts[-1].lower().replace("-", "_")
    if ".".join(parts[-2:]).lower() in UNSUPPORTED or (bad == len(parts) - 1 and leaf in UNSUPPORTED):
        return _of_step(parts, leaf, data)
    if leaf not in NOT_NEGATED:  # disable_x means x, with the other value
        leaf = NEGATED.sub("", leaf) or "enable"
    every = dict.fromkeys(schema_keys.everywhere())
    valid = [k for k in every if not data or schema_keys.at(k.split("."), data) is not None]

    # a file of a step, or a name that other programs use
    if of_step := _of_step(parts, leaf, data):
        return of_step
    ours = our_key((*parts[:-1], leaf), valid) or our_key(parts, valid)
    section = ".".join(parts[:bad])
    if any(section.startswith(f"{node}.") for node in OPEN):  # the user's own names: stay there
        names = schema_keys.names(tuple(parts[:bad]), data)
        there = _leaf(ours) if ours and _leaf(ours) in names else nearest(leaf, names)
        return f"{section}.{there}" if there and bad == len(parts) - 1 else None
    if ours is not None:
        return ours

    # the same name deeper in its section, else a similar one next to it
    below = [k for k in valid if bad == len(parts) - 1 > 0 and k.startswith(f"{'.'.join(parts[:bad])}.")]
    if len(deeper := [k for k in below if _leaf(k) == leaf]) == 1:
        return deeper[0]
    above = ".".join(parts[:bad])
    wrong = leaf if bad == len(parts) - 1 else parts[bad]
    similar = nearest(wrong, [_leaf(k) for k in valid if k.rpartition(".")[0] == above])
    meant = ".".join((*parts[:bad], similar, *parts[bad + 1 :])) if similar else ""
    if meant in valid or (meant and data and schema_keys.at(meant.split("."), data) is not None):
        return meant

    # the same key with dots in place of underscores, or the reverse
    flat = [k for k in valid if k.replace(".", "_") == "_".join(parts)]
    if len(flat) == 1:
        return flat[0]

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
    if len(parts) > 1 and not inside:  # in an unknown section, a similar name may mean anything
        return None
    near = nearest(leaf, {_leaf(k) for k in valid}, 0.75)
    return _only(parts, [k for k in valid if _leaf(k) == near])


def _of_step(parts: Sequence[str], leaf: str, data: Any) -> str | None:
    """Returns the key of a step's setting that ``leaf``, the last of ``parts``, may mean.

    Examples are src and dst.
    """
    if len(parts) != 3 or parts[0] != "steps":
        return None
    field = step_setting(leaf, [*schema_keys.names(tuple(parts[:2]), data or {})])
    return f"steps.{parts[1]}.{field}" if field else None


def _may_be_meant(parts: Sequence[str], key: str, sections: Collection[str]) -> bool:
    """Returns true if ``key`` may be meant by ``parts``, which begin with an existing section.

    A key of another section may be meant if it is not deeper: train.lr means optim.lr, but checkpoint.dir
    does not mean logger.trackio.dir.
    """
    own = len(parts) > 1 and parts[0] in sections
    if own and key.startswith(f"{parts[0]}."):
        return key.count(".") + 1 >= len(parts)  # otherwise the sections in between would be dropped
    moves = key.count(".") < len(parts) and parts[-1] not in GENERIC
    return not own or moves


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _only(parts: Sequence[str], keys: Sequence[str]) -> str | None:
    """Returns the key that ``parts`` most likely means; ``None`` if several are equally likely.

    This is the most similar one or, for a name without a section, the one with the fewest dots.
    """
    if len(keys) == 1:
        return keys[0]
    if len(parts) > 1:
        return nearest(".".join(parts), keys)
    depth = min((k.count(".") for k in keys), default=0)
    highest = [k for k in keys if k.count(".") == depth]
    return highest[0] if len(highest) == 1 else None
