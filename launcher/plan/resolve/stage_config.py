"""``parallel.pipeline.stage_config``: the stage of each module, as requested or chosen automatically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from launcher.errors import Problem, RequestError
from launcher.job.schema.job import Job
from launcher.plan.balance.balance import balanced_stages
from launcher.plan.cut import stages, written_stages
from launcher.plan.cut.inseparable_modules import components, together, why
from launcher.plan.cut.stages import Stage
from launcher.plan.cut.traced_model import TracedModel
from launcher.plan.memory import fits_cluster
from launcher.plan.memory.optimizer_state import StateSize
from launcher.plan.resolve.fewer_stages import too_few
from launcher.plan.sizes import Sizes
from launcher.plan.values.model_graph import Graph, ModelStructure
from launcher.plan.values.note import Note
from launcher.plan.values.resolved import Origins, SwitchesFile

KEY = written_stages.KEY

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
        stage = written_stages.stage_of(config, module)
        if stage is None:
            inside = (p.name for p in skeleton.params if stages.covers(module, p.name))
            stage = next((written_stages.stage_of(config, name) for name in inside), None)
        if stage is not None:
            out[module] = stage

    for name in sorted(glued):
        stage = written_stages.stage_of(config, name)
        if stage is not None and (name in config or not written_stages.owner(name)):
            out[name] = stage
    return out


def _pasteable(problem: Problem, config: Config) -> Problem:
    """Returns ``problem`` without its cure, if a deeper key of the request would override the cure."""
    keys = [word.partition("=")[0].removeprefix(f"{KEY}.") for word in problem.cure.split()]
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
        raise RequestError((too_few(job, sizes, model, groups),))

    if like is None or any(m not in like for group in groups for m in group):
        room = None if sizes.engine.over_matrices else fits_cluster.room(job)
        balanced = balanced_stages(job, sizes, model, groups, optimizer=optimizer, room=room)
        runs = enumerate(pairwise(balanced.cut))
        chosen = {m: stage for stage, (i, j) in runs for group in groups[i:j] for m in group}
        how = balanced.text
    else:
        chosen = {m: like[m] for group in groups for m in group}
        how = "balanced as if nothing was recomputed"
    notes = [Note(KEY, f"auto -> the stages above: {how}")]
    for group in groups:
        if len(group) > 1:
            reason = why(model.graph, group)
            notes.append(Note(KEY, f"auto: {together(group)} on one stage, because {reason}"))
    return chosen, notes


def _bytes(skeleton: ModelStructure) -> Counter[str]:
    """The bytes of the parameters inside of each module."""
    out = Counter[str]()
    for p in skeleton.params:
        for module in stages.around(written_stages.owner(p.name)):
            out[module] += p.spec.nbytes
    return out
