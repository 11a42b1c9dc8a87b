"""``parallel.pipeline.stage_config``: the stage of each module, as requested or chosen automatically."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from launcher.errors import Problem, RequestError
from launcher.job.schema.base import yaml_text
from launcher.job.schema.did_you_mean import did_you_mean
from launcher.job.schema.job import Job
from launcher.plan import resolve
from launcher.plan.balance.balance import balanced_stages
from launcher.plan.cut import stages, uncut_modules
from launcher.plan.cut.inseparable_modules import components, together, why
from launcher.plan.cut.stages import Stage
from launcher.plan.cut.traced_model import TracedModel
from launcher.plan.memory import fits_cluster
from launcher.plan.memory.optimizer_state import StateSize
from launcher.plan.resolve import pipeline
from launcher.plan.sizes import Sizes
from launcher.plan.values.model_graph import Graph, ModelStructure
from launcher.plan.values.module_names import (
    STAGE_CONFIG,
    from_the_top,
    is_glob,
    matches,
    owner,
    prefixes,
    stage_of,
)
from launcher.plan.values.note import Note
from launcher.plan.values.resolved import Origins, SwitchesFile
from launcher.plan.values.text import many

Config = Mapping[str, int]
"""The requested stages, by names of modules or parameters."""


@dataclass(frozen=True)
class StageRequest:
    """What a request says before the model is read: the sizes, and explicit stages if any.

    ``like``: stages from another plan, which are taken in place of an automatic choice. ``switches_file``:
    the file that has switches of ``transformer_opt``. ``strategies``: the files that have strategies of
    operators.
    """

    sizes: Sizes
    config: dict[str, int] | None
    like: dict[str, int] | None = None
    switches_file: SwitchesFile | None = None
    strategies: Origins = field(default_factory=dict)


def cut(
    job: Job, request: StageRequest, model: TracedModel, optimizer: StateSize
) -> tuple[tuple[Stage, ...], list[Note]]:
    """Cuts ``model`` into stages, and returns them with notes on how they were chosen.

    ``optimizer``: the size of its state. Raises ``RequestError`` if the stages are impossible.
    """
    sizes, config = request.sizes, request.config
    called = list(dict.fromkeys(n.target for n in model.graph.nodes if n.kind == "module"))
    notes: list[Note] = []
    if model.leaves is None:
        requested = dict.fromkeys(called, 0)
    elif config is None:
        requested, notes = automatic(job, request, model, called, optimizer)
    else:
        glued = {n.target for n in model.graph.nodes if n.kind == "param"}
        requested = _requested_stages(config, called, glued, model.skeleton)

    at, problems = stages.place(model.graph, requested, sizes.virtual - 1)
    made: tuple[Stage, ...] = ()
    if not problems:
        made, problems = stages.cut(model.graph, at, sizes.virtual, model.skeleton)

    problems = [_pasteable(problem, config or {}) for problem in problems]
    problems += _output(model.graph)
    if problems:
        raise RequestError(tuple(problems))
    return made, notes


def _requested_stages(
    config: Config, called: Sequence[str], glued: Collection[str], skeleton: ModelStructure
) -> dict[str, int]:
    """Returns the stages of the ``called`` modules, and of the parameters that glue uses (``glued``).

    A module without a stage of its own takes the stage of its first parameter that has one. A parameter
    outside of all modules, or one that the request names, keeps its own stage.
    """
    out: dict[str, int] = {}
    for module in called:
        stage = stage_of(config, module)
        if stage is None:
            inside = (p.name for p in skeleton.params if stages.covers(module, p.name))
            stage = next((stage_of(config, name) for name in inside), None)
        if stage is not None:
            out[module] = stage

    for name in sorted(glued):
        stage = stage_of(config, name)
        if stage is not None and (name in config or not owner(name)):
            out[name] = stage
    return out


def _pasteable(problem: Problem, config: Config) -> Problem:
    """Returns ``problem`` without its cure, if a deeper key of the request would override the cure."""
    keys = [word.partition("=")[0].removeprefix(f"{STAGE_CONFIG}.") for word in problem.cure.split()]
    outdone = any(k.startswith(f"{key}.") for key in keys for k in config)
    return replace(problem, cure="") if outdone else problem


def _output(graph: Graph) -> list[Problem]:
    """Returns a problem if the model's output is nothing that a loss accepts."""
    last = graph.nodes[-1]
    if last.out is not None and (last.keys or not last.packed):
        return []
    returned, inside = last.keys if last.out is None and last.keys else ("an object", "")
    text = f"its forward returns {returned}, neither a tensor nor a plain tuple, list or dict of tensors"
    cure = "return only the logits, as in out.logits"
    if inside:
        line = f"def forward(self, *inputs): return super().forward(*inputs){inside}"
        cure = f"return only the logits, here or in a derived class: {line}"
    return [Problem("model", f"{text}; for a loss of your own return one of these, otherwise {cure}")]


def automatic(
    job: Job, request: StageRequest, model: TracedModel, called: Sequence[str], optimizer: StateSize
) -> tuple[dict[str, int], list[Note]]:
    """Chooses a stage for each of the ``called`` modules with parameters, so that a step is short and fits.

    Stages are cut only where data flow in one direction. Raises ``RequestError`` for too few modules.
    """
    sizes, like, nbytes = request.sizes, request.like, _bytes(model.skeleton)
    groups = components(model.graph, [m for m in called if nbytes[m]])
    if len(groups) < sizes.virtual:
        raise RequestError((_too_few(job, sizes, model, groups),))

    if like is None or any(m not in like for group in groups for m in group):
        room = None if sizes.engine.over_matrices else fits_cluster.room(job)
        balanced = balanced_stages(job, sizes, model, groups, optimizer=optimizer, room=room)
        runs = enumerate(pairwise(balanced.cut))
        chosen = {m: stage for stage, (i, j) in runs for group in groups[i:j] for m in group}
        how = balanced.text
    else:
        chosen = {m: like[m] for group in groups for m in group}
        how = "balanced as if nothing was recomputed"
    notes = [Note(STAGE_CONFIG, f"auto -> the stages above: {how}")]
    for group in groups:
        if len(group) > 1:
            reason = why(model.graph, group)
            notes.append(Note(STAGE_CONFIG, f"auto: {together(group)} on one stage, because {reason}"))
    return chosen, notes


def _bytes(skeleton: ModelStructure) -> Counter[str]:
    """Returns the bytes of the parameters inside of each module."""
    out = Counter[str]()
    for p in skeleton.params:
        for module in stages.around(owner(p.name)):
            out[module] += p.spec.nbytes
    return out


def _too_few(job: Job, sizes: Sizes, model: TracedModel, groups: Sequence[tuple[str, ...]]) -> Problem:
    """Returns the problem; its cure is the smallest change that leaves no more stages than ``groups``."""
    text = f"the model has {many(sum(map(len, groups)), 'module')} with parameters"
    for group in groups:
        if len(group) > 1:
            text = f"{text}; {together(group)} must be on one stage, because {why(model.graph, group)}"
    grouped = any(len(group) != 1 for group in groups)
    if grouped:
        text = f"{text}; that leaves {many(len(groups), 'part')}"
    text = f"{text}, too few for {sizes.virtual} stages"

    for key, changed in _fewer(job, sizes):
        virtual = _virtual(job, changed)
        if virtual is None or virtual > len(groups):
            continue
        if _as_far(model.skeleton, sizes.virtual, virtual, grouped):
            words = [f"{pipeline.KEY}.{name}={yaml_text(value)}" for name, value in changed.items()]
            return Problem(f"{pipeline.KEY}.{key}", text, " ".join(words))
    return Problem(f"{pipeline.KEY}.stages", f"{text}; use fewer stages")


def _fewer(job: Job, sizes: Sizes) -> list[tuple[str, dict[str, Any]]]:
    """Lists changes of ``parallel.pipeline`` that make fewer stages, smallest first.

    Each comes with the key that the problem is reported for. A change never contains a key that would keep
    its value.
    """
    out: list[tuple[str, dict[str, Any]]] = []
    if sizes.v:
        out.append(("scheduler", {"scheduler": "1f1b"}))
    if job.parallel.pipeline.interleave:
        out.append(("interleave", {"interleave": False}))
    if sizes.v and job.parallel.pipeline.interleave:
        out.append(("scheduler", {"scheduler": "1f1b", "interleave": False}))

    # fewer ranks on the axis; then the same with one virtual stage each, if there are several now
    fewer = range(sizes.grid["pp"] - 1, 0, -1)
    out += [("stages", {"stages": n}) for n in fewer]
    if sizes.v:
        out += [("stages", {"stages": n, "scheduler": "1f1b"}) for n in fewer]
    elif sizes.chunks > 1:
        out += [("stages", {"stages": n, "interleave": False}) for n in fewer]
    return out


def _virtual(job: Job, changed: dict[str, Any]) -> int | None:
    """Returns the number of stages of ``job`` with these changes; ``None`` if it has problems then."""
    pipe = job.parallel.pipeline.model_copy(update=changed)
    other = job.model_copy(update={"parallel": job.parallel.model_copy(update={"pipeline": pipe})})
    sizes, problems = resolve.sizes(other)
    return None if problems or sizes is None else sizes.virtual


def _as_far(skeleton: ModelStructure, now: int, then: int, grouped: bool) -> bool:
    """Returns whether a cut into ``then`` stages divides modules into the same units as one into ``now``.

    Only then does it keep the same modules together.
    """
    return (
        not grouped or then == 1 or uncut_modules.units(skeleton, now) == uncut_modules.units(skeleton, then)
    )


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
    return [Problem(STAGE_CONFIG, text, f"{STAGE_CONFIG}=auto")] if stages else []


def _no_such_stage(key: str, stage: int, stages: int, stage_range: str) -> Problem | None:
    if 0 <= stage < stages:
        return None
    where, nearest = f"{STAGE_CONFIG}.{key}", 0 if stage < 0 else stages - 1
    return Problem(where, f"{stage}: no such stage; there are stages {stage_range}", f"{where}={nearest}")


def _no_number(key: str, stage: Any, guess: int, stage_range: str) -> Problem:
    meant = int(stage) if isinstance(stage, str) and stage.isdecimal() else guess
    text = f"{stage!r} is not a stage number; there are stages {stage_range}"
    return Problem(f"{STAGE_CONFIG}.{key}", text, f"{STAGE_CONFIG}.{key}={meant}")


def _no_such_module(key: str, stage: int, names: tuple[str, ...]) -> list[Problem]:
    where = f"{STAGE_CONFIG}.{key}"
    if not any(matches(key, n) for n in names):
        tops = tuple(dict.fromkeys(n.split(".")[0] for n in names))
        if close := from_the_top(key, names) or _near(key, names, tops):
            text = f"the model has no module {key!r}{did_you_mean(close)}"
            return [Problem(where, text, f"{STAGE_CONFIG}.{close}={stage}")]
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
    cure = (
        " ".join(f"{STAGE_CONFIG}.{n}={s}" for n, s in without.items())
        if len(names) <= 3
        else f"{STAGE_CONFIG}=auto"
    )
    return Problem(
        STAGE_CONFIG, f"{', '.join(map(repr, names[:6]))}{more} {verb} parameters but no stage", cure
    )
