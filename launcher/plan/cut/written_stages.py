"""The stages that ``stage_config`` gives to modules, and their problems."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from launcher.errors import Problem
from launcher.job.schema.did_you_mean import did_you_mean
from launcher.plan.values.model_graph import ModelStructure
from launcher.plan.values.module_names import best_key, from_the_top, is_glob, matches, prefixes

KEY = "parallel.pipeline.stage_config"


def flatten(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Returns ``config`` with dotted keys, which mean the same as nested ones.

    The later of two equal keys wins and takes the later position.

    >>> flatten({"layers.0": 0, "layers": {0: 1, "1": 1}})
    {'layers.0': 1, 'layers.1': 1}
    """
    out: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        for name, stage in flatten(value, path).items() if isinstance(value, Mapping) else ((path, value),):
            out.pop(name, None)
            out[name] = stage
    return out


BACKBONE, LOSS = "_backbone", "_loss_fn"
"""The names of the network and of the loss in MindSpore's ``WithLossCell``."""


def unwrapped(keys: Mapping[str, Any], skeleton: ModelStructure, stages: int) -> dict[str, Any]:
    """Returns ``keys`` with the model's own names if they are those of a ``WithLossCell`` around it.

    The loss is on the last stage, so ``keys`` may place it there; that entry is dropped.
    """
    above = f"{BACKBONE}."
    if BACKBONE in skeleton.modules or not any(key.startswith(above) for key in keys):
        return dict(keys)
    kept = {key: stage for key, stage in keys.items() if (key, stage) != (LOSS, stages - 1)}
    out: dict[str, Any] = {}
    for key, stage in kept.items():
        out.pop(key.removeprefix(above), None)
        out[key.removeprefix(above)] = stage
    return out


def stage_of(keys: Mapping[str, int], name: str) -> int | None:
    """Returns the stage that ``keys`` give to ``name``, or ``None``."""
    key = best_key(keys, name)
    return None if key is None else keys[key]


def owner(param: str) -> str:
    """Returns the module that owns a parameter ("" for the root).

    >>> owner("layers.0.attn.wq.weight")
    'layers.0.attn.wq'
    """
    return param.rpartition(".")[0]


def complaints(
    keys: Mapping[str, Any], skeleton: ModelStructure, ranks: int, chunks: int = 1
) -> list[Problem]:
    """Returns all problems of a ``stage_config`` for this model on ``ranks`` x ``chunks`` stages."""
    stages, stage_range = ranks * chunks, _there(ranks, chunks)
    names = (*skeleton.modules, *(p.name for p in skeleton.params))
    numbers = _numbers(keys)

    # each key alone
    problems: list[Problem] = []
    for key, stage in numbers.items():
        missing = _no_such_stage(key, stage, stages, stage_range)
        problems += [missing] if missing else _no_such_module(key, stage, names)
    if len(numbers) < len(keys):
        guess = _without(numbers, skeleton, stages)
        problems += [
            _no_number(k, s, guess.get(k, 0), stage_range) for k, s in keys.items() if k not in numbers
        ]
    if problems:
        return problems

    # all keys together: no module without a stage, no stage without a module
    without = _without(keys, skeleton, stages)
    if without:
        return [_no_stage(without)]
    return _unused(set(range(stages)) - {stage_of(keys, n) for n in names}, stage_range)


def impossible(keys: Mapping[str, Any], ranks: int, chunks: int = 1) -> list[Problem]:
    """Returns the problems of ``keys`` for any model: stages that do not exist, or that no key names."""
    stages, stage_range, numbers = ranks * chunks, _there(ranks, chunks), _numbers(keys)
    problems = [p for p in (_no_such_stage(k, s, stages, stage_range) for k, s in numbers.items()) if p]
    if problems or len(numbers) < len(keys):
        return problems
    return _unused(set(range(stages)) - set(numbers.values()), stage_range)


def _numbers(keys: Mapping[str, Any]) -> dict[str, int]:
    return {k: s for k, s in keys.items() if isinstance(s, int) and not isinstance(s, bool)}


def _there(ranks: int, chunks: int) -> str:
    stages = ranks * chunks
    text = ("0" if stages == 1 else f"0..{stages - 1}") + f" (parallel.pipeline.stages={ranks}"
    return text + (f" x chunks={chunks})" if chunks > 1 else ")")


def _unused(stages: Collection[int], stage_range: str) -> list[Problem]:
    text = f"nothing is on stage {', '.join(map(str, sorted(stages)))}; there are stages {stage_range}"
    return [Problem(KEY, text, f"{KEY}=auto")] if stages else []


def _no_such_stage(key: str, stage: int, stages: int, stage_range: str) -> Problem | None:
    if 0 <= stage < stages:
        return None
    where, nearest = f"{KEY}.{key}", 0 if stage < 0 else stages - 1
    return Problem(where, f"{stage}: no such stage; there are stages {stage_range}", f"{where}={nearest}")


def _no_number(key: str, stage: Any, guess: int, stage_range: str) -> Problem:
    meant = int(stage) if isinstance(stage, str) and stage.isdecimal() else guess
    text = f"{stage!r} is not a stage number; there are stages {stage_range}"
    return Problem(f"{KEY}.{key}", text, f"{KEY}.{key}={meant}")


def _no_such_module(key: str, stage: int, names: tuple[str, ...]) -> list[Problem]:
    where = f"{KEY}.{key}"
    if not any(matches(key, n) for n in names):
        tops = tuple(dict.fromkeys(n.split(".")[0] for n in names))
        if close := from_the_top(key, names) or _near(key, names, tops):
            text = f"the model has no module {key!r}{did_you_mean(close)}"
            return [Problem(where, text, f"{KEY}.{close}={stage}")]
        known = ", ".join(tops[:12]) + (" ..." if len(tops) > 12 else "")
        return [Problem(where, f"the model has no module {key!r}; it has {known}")]
    return []


def _near(key: str, names: Sequence[str], tops: Sequence[str]) -> str | None:
    """Returns the name that is most similar to ``key``, or ``None``.

    Numbers must be equal. Of a glob only the first part may differ.
    """
    if not is_glob(key):
        same = [n for n in names if re.findall(r"\d+", n) == re.findall(r"\d+", key)]
        return next(iter(get_close_matches(key, same, 1, 0.5)), None)
    first, dot, rest = key.partition(".")
    fits = [t for t in tops if any(matches(t + dot + rest, n) for n in names)]
    return next((t + dot + rest for t in get_close_matches(first, fits, 1, 0.5)), None)


def _without(keys: Mapping[str, Any], skeleton: ModelStructure, stages: int) -> dict[str, int]:
    """Returns the largest modules (or single parameters) without a stage, each with a suggested stage.

    The modules before and after it suggest the stage.
    """
    has = {p.name: stage_of(keys, p.name) for p in skeleton.params if not p.buffer}
    order = list(has.values())
    out: dict[str, int] = {}
    for at, (name, stage) in enumerate(has.items()):
        if stage is None:
            above = prefixes(name)[:-1]
            bare = [m for m in above if all(has[n] is None for n in has if n.startswith(m + "."))]
            largest = bare[0] if bare else name
            out.setdefault(largest, _suggested(order[:at], order[at:], stages))
    return out


def _suggested(before: Sequence[int | None], after: Sequence[int | None], stages: int) -> int:
    """Returns a stage for what lies between modules: that of the module before, else that of the next one.

    If no later module has a stage, it is the last stage.
    """
    earlier = [s for s in before if s is not None]
    later = [s for s in after if s is not None]
    if not later:
        return stages - 1
    return earlier[-1] if earlier else later[0]


def _no_stage(without: Mapping[str, int]) -> Problem:
    """Returns one problem for all: one forgotten name in a large model may leave hundreds without a stage."""
    names = list(without)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    verb = "has" if len(names) == 1 else "have"
    cure = " ".join(f"{KEY}.{n}={s}" for n, s in without.items()) if len(names) <= 3 else f"{KEY}=auto"
    return Problem(KEY, f"{', '.join(map(repr, names[:6]))}{more} {verb} parameters but no stage", cure)
