"""The override that a misspelled one means, as a cure to paste."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.job import intended_value
from launcher.job.cures.keys_of_other_programs import NOT_NEGATED, UNSUPPORTED, our_key, step_setting
from launcher.job.overrides import OPEN, paste
from launcher.job.schema import keys as schema_keys
from launcher.job.schema.did_you_mean import did_you_mean, nearest
from launcher.job.schema.redact import hidden

_NONE = object()  # None may itself be the intended value


NEGATED = re.compile(r"\A((disable|no|not|non|dont|without|skip)[_-]|disabled?\Z)")
"""Matches the beginning of negated names (disable_x, no_x), and the key ``disabled`` of a section."""


def value(parts: tuple[str, ...], bad: Any, data: Any) -> str:
    """Returns ``key=value`` with the first reading of ``bad`` that the schema accepts, or ""."""
    key = ".".join(parts)
    note = schema_keys.at(parts, data)
    if hidden(key, bad) or note is None:
        return ""
    if tokenizer := _tokenizer_file(parts, bad, data):
        return tokenizer
    good = next(intended_value.readings(key, note, bad), _NONE)
    return "" if good is _NONE else paste(key, good)


def _tokenizer_file(parts: tuple[str, ...], bad: Any, data: Any) -> str:
    """Returns the overrides for a tokenizer that is named by its file, or by its folder; "" otherwise."""
    sibling = (*parts[:-1], "tokenizer_file")
    if parts[-1] != "tokenizer" or not isinstance(bad, str) or schema_keys.at(sibling, data) is None:
        return ""
    file = bad if bad.endswith(".json") else str(Path(bad, "tokenizer.json"))
    if "/" not in bad and file != bad and not Path(file).is_file():
        return ""
    return f"{paste('.'.join(parts), 'file')} {paste('.'.join(sibling), file)}"


WITHOUT_GUESS = ("tokenizer",)
"""Keys whose words are never corrected, because another word would change the training data."""


def group(parts: tuple[str, ...], bad: Mapping[str, Any], data: Any) -> str:
    """Returns ``key={...}`` with the first change to ``bad`` that the schema accepts; "" if it accepts none.

    It first sorts lists of numbers and removes duplicates; then it tries the other words that a key accepts.
    """
    note = schema_keys.at(parts, data)
    for good in (_sorted_lists(bad), *_other_words(parts, bad, data)):
        if schema_keys.accepts(note, good):
            return paste(".".join(parts), good) if good else ""
    return ""


def _sorted_lists(bad: Mapping[str, Any]) -> dict[str, Any]:
    numbers = [k for k, v in bad.items() if isinstance(v, list) and {*map(type, v)} == {int}]
    return {**bad, **{k: sorted(set(bad[k])) for k in numbers}}


def _other_words(parts: tuple[str, ...], bad: Mapping[str, Any], data: Any) -> Iterator[dict[str, Any]]:
    """Yields ``bad`` with another word at one of its keys, if several of its keys are set."""
    keys = [k for k, v in bad.items() if v is not None]
    for k in keys if len(keys) > 1 else ():
        if k in WITHOUT_GUESS:
            continue
        for word in schema_keys.literals(schema_keys.at((*parts, k), data)):
            yield {**bad, k: word}


GENERIC = ("path", "dir", "name", "root", "format", "cache", "weights", "config", "size", "every", "steps")
"""Names with different meanings in different sections."""


def choice(word: object, names: Sequence[str], title: str) -> str:
    """Returns the end of a message about an unknown ``word``: the most similar name, and all names."""
    return f"{did_you_mean(nearest(word, names))} ({title}: {', '.join(names)})"


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
