"""From a request to its plan: builds the model without memory, reads it, and lets ``plan`` decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from launcher.data.checks import check
from launcher.data.fallback import resolve as resolve_data
from launcher.data.model_compatibility import check_fit
from launcher.errors import Problem, RequestError, owned, refuse
from launcher.job.schema.components import Target
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Parallel, Pipeline
from launcher.job.targets import absent, there
from launcher.models.defaults import resolve as resolve_model
from launcher.plan import recompute_auto, sample_checks
from launcher.plan.operators.resolve import Flow, resolve, splits, uncalled
from launcher.plan.partition import stage_config
from launcher.plan.partition.sequence_chunks import Pieces, grain
from launcher.plan.partition.sizes import Note
from launcher.plan.plan import Asked, Plan, ask, leaves, plan
from launcher.plan.refusals import model_effects, own_optimizer
from launcher.plan.settings import dataset_strategy, recompute
from launcher.plan.settings.checkpoint import misnamed
from launcher.plan.traced_model import TracedModel
from launcher.plan.values.facts import COMPUTE, DTYPE, Graph, Skeleton, TensorSpec
from launcher.plan.values.optimizer_traits import OptimizerTraits
from launcher.plan.values.recomputed import Recomputed
from launcher.plan.values.text import listed
from launcher.planner.recompute_auto import solved
from launcher.planner.request_files import fits, inlined

if TYPE_CHECKING:
    from torch import nn


def inputs(job: Job, batch: int) -> tuple[TensorSpec, ...]:
    """What the forward takes for ``batch`` samples, floating inputs in the dtype that it computes in."""
    from launcher.data.spec import input_specs

    specs = input_specs(job.data, batch, job.security.allow)
    compute = COMPUTE[job.train.precision]
    return tuple(TensorSpec(s.shape, compute) if s.dtype.startswith("float") else s for s in specs)


def builder(job: Job) -> Callable[[], nn.Module]:
    """Builds the model on the default device, in the default dtype."""
    from launcher.models.build import build_model

    return lambda: build_model(job.model, job.security.allow)


def settled(job: Job) -> Job:
    """``job`` itself, or with ``debug.onerank`` the same batches, micro batches and loss on one rank."""
    if not job.debug.onerank:
        return job
    pipe = job.parallel.pipeline
    whole = Pipeline(micro_batch_num=pipe.micro_batch_num or pipe.stages, loss_reduction=pipe.loss_reduction)
    launch = job.launch.model_copy(update={"nproc": 1, "nnodes": 1})
    parallel = Parallel(pipeline=whole, deferred_init=job.parallel.deferred_init)
    return job.model_copy(update={"parallel": parallel, "launch": launch})


@dataclass(frozen=True)
class Checked:
    """A request whose settings can be together: ``job`` with what its files say, and what comes of it."""

    job: Job
    asked: Asked


def before_torch(job: Job, found: Sequence[Problem] = ()) -> Checked:
    """Reads the files of a ``settled`` job; ``found``: what is known to be wrong already.

    Raises ``RequestError`` with all that can be refused without torch.
    """
    job, wrong = inlined(job)
    found = [*found, *check(job.data), *check_fit(job.model, job.data), *_unlike(job, own=False), *wrong]
    found += recompute_auto.unknown(job)
    return Checked(job, ask(job, [*found, *_nowhere(job)]))


def _nowhere(job: Job) -> list[Problem]:
    """Classes of the user's own in modules that are not there; nothing is imported."""
    chosen = {"model": job.model, "data": job.data, "optim": job.optim}
    targets = {f"{section}._target_": s.target for section, s in chosen.items() if isinstance(s, Target)}
    return [absent(key, path) for key, path in targets.items() if not there(path)]


@contextmanager
def planning() -> Iterator[None]:
    """What is refused here was not known before a plan was begun."""
    try:
        yield
    except RequestError as error:
        error.planned = True
        raise


def _unlike(job: Job, own: bool) -> list[Problem]:
    """Slices of the data set that are not those of its tensors; a user's ``own`` class is opened to know."""
    strategy = job.parallel.dataset_strategy
    if isinstance(strategy, str) or isinstance(job.data, Target) is not own:
        return []
    if not (strategy and all(strategy)):
        return []
    from launcher.data.spec import input_specs, target_spec

    allow = job.security.allow
    specs = (*input_specs(job.data, 1, allow), target_spec(job.data, 1, allow))
    problem = dataset_strategy.refused_for(strategy, tuple(len(s.shape) for s in specs))
    return [problem] if problem else []


def plan_job(job: Job) -> Plan:
    """The plan of ``job``. Raises ``RequestError``; starts no process, writes nothing, allocates no model."""
    checked = before_torch(settled(job))
    with planning():
        return plan_checked(checked)


def plan_checked(checked: Checked) -> Plan:
    """The plan of a request that nothing is known to be wrong with."""
    job = checked.job
    refuse(_unlike(job, own=True))
    from launcher.parallel.model_state.module_globals import put_back

    with put_back(own_files(job)):
        made = _made(job, checked.asked)
    fits(job, made)
    refuse(_mismatched(job, made))
    return made


def own_files(job: Job) -> list[str]:
    """The Python modules that a model of the user's own is from; they may count or keep what is built."""
    if not isinstance(job.model, Target):
        return []
    from torch import nn

    from launcher.job.targets import locate
    from launcher.parallel.model_state.module_globals import files

    return files(locate(job.model.target, job.security.allow, nn.Module, key="model._target_"))


def _made(job: Job, asked: Asked) -> Plan:
    """The plan, once it is settled what runs again."""
    if recompute_auto.asked(job):
        return solved(job, lambda other: _cut(other, ask(other)))
    return _cut(job, asked)


def _cut(job: Job, asked: Asked) -> Plan:
    """The plan, with stacks of blocks in one piece where they cannot be cut."""
    model = _read(job)
    traits = _tried(job, model.skeleton)
    asked, more = _unwrapped(asked, model.skeleton)
    fine, kept = _undivided(job, asked, model.skeleton, leaves(asked, model.skeleton))
    more += kept
    try:
        return _planned(job, asked, model, fine, traits=traits, more=more)
    except RequestError as error:
        coarse, _ = _undivided(job, asked, model.skeleton, leaves(asked, model.skeleton, stacks=False))
        if coarse == fine:
            raise
        more = [*more, _unopened(coarse or (), fine or (), error.problems[0])]
        return _planned(job, asked, _read(job), coarse, traits=traits, more=more)


def _undivided(
    job: Job, asked: Asked, skeleton: Skeleton, found: tuple[str, ...] | None
) -> tuple[tuple[str, ...] | None, list[Note]]:
    """Leaves, with what automatic stages leave in one piece for it runs again as a whole."""
    if found is None or asked.config is not None:
        return found, []
    out, whole = recompute.undivided(job.parallel.recompute, skeleton, found, asked.sizes.virtual)
    text = f"auto: {listed(whole)} on one stage each, for what runs again is not cut"
    return out, [Note(stage_config.KEY, text)] if whole else []


def _unwrapped(asked: Asked, skeleton: Skeleton) -> tuple[Asked, list[Note]]:
    """With the model's own names where MindSpore's wrapper is around those of the request."""
    if asked.config is None:
        return asked, []
    names = stage_config.unwrapped(asked.config, skeleton, asked.sizes.virtual)
    if names == asked.config:
        return asked, []
    text = f"{stage_config.BACKBONE}.NAME -> NAME: names of a WithLossCell around the model"
    return replace(asked, config=names), [Note(stage_config.KEY, text)]


def _mismatched(job: Job, made: Plan) -> list[Problem]:
    """Targets that do not fit what the model returns, and samples that cannot be evaluated as they are."""
    from launcher.data.spec import target_spec

    target = target_spec(job.data, made.sizes.micro_batch, job.security.allow)
    found = list(sample_checks.problems(made, target, own=isinstance(job.model, Target)))

    # of ours only the files know how many samples they hold
    if made.observed.mixed and isinstance(job.data, Target):
        from launcher.data.open import open_data

        held = len(open_data(job.data, seed=job.seed, allow=job.security.allow).val)
        found += [p for p in [sample_checks.uneven(job, made, held)] if p]
    return found


def _unopened(coarse: Sequence[str], fine: Sequence[str], why: Problem) -> Note:
    shut = ", ".join(u for u in coarse if u not in fine)
    return Note(stage_config.KEY, f"auto: {shut} stays in one piece, for it could not be cut: {why.text}")


@dataclass(frozen=True)
class _Model:
    """A model without memory; ``lost``: why its weights cannot be made without the whole of it.

    ``marks``: Python attributes that its tensors had, with the names of those.
    """

    module: nn.Module
    skeleton: Skeleton
    lost: str
    marks: dict[str, tuple[str, ...]]


def _read(job: Job) -> _Model:
    from launcher.parallel.deferred_init.record import record
    from launcher.parallel.trace import model_facts

    build = builder(job)
    with model_facts.default_dtype(model_facts.dtype_of(DTYPE[job.train.precision])):
        with _owned(job.model, "model"):
            model, tape = record(build, job.seed)
        if isinstance(job.model, Target):
            from launcher.parallel.deferred_init.uninitialized import problems

            refuse(problems(build, model, tape))
        known = model_facts.skeleton(model)
    known = replace(known, traits=replace(known.traits, shared=tape.shared, computed=tape.computed))
    refuse((*model_effects.unfit(known), *misnamed(known)))
    return _Model(model, known, tape.why if job.parallel.deferred_init else "", tape.marks)


def _owned(settings: object, section: str) -> AbstractContextManager[None]:
    """What a class of the user's own raises is told in its own words."""
    if not isinstance(settings, Target):
        return nullcontext()
    return owned(f"{section}._target_", f"{settings.target}: cannot be built")


def _tried(job: Job, skeleton: Skeleton) -> OptimizerTraits | None:
    """What an optimizer class of the user's own does; ``None`` of ours, and where nothing is trained."""
    shapes = [p.spec.shape for p in skeleton.params if p.trainable and not p.buffer and p.same_as == p.name]
    if not isinstance(job.optim, Target) or not shapes:
        return None
    from launcher.optim.build import build_own
    from launcher.optim.probe import probe

    build = partial(build_own, job.optim, job.security.allow)
    return probe(
        build,
        job.optim.target,
        shapes,
        device=job.launch.device,
        dtype=DTYPE[job.train.precision],
    )


def _planned(
    job: Job,
    asked: Asked,
    model: _Model,
    whole: tuple[str, ...] | None,
    traits: OptimizerTraits | None,
    more: Sequence[Note] = (),
) -> Plan:
    """The plan with the modules ``whole`` in one piece each; ``model`` is cut and cannot be planned again."""
    from launcher.parallel.model_state.references import leaving, unmarked
    from launcher.parallel.stages.half_model import narrow
    from launcher.parallel.trace import model_facts

    with model_facts.default_dtype(model_facts.dtype_of(DTYPE[job.train.precision])), unmarked(model.marks):
        specs = inputs(job, asked.sizes.micro_batch)
        compute = COMPUTE[job.train.precision]
        if compute != DTYPE[job.train.precision]:
            narrow(model.module, compute)
        with leaving(model.module):
            seen = _followed(job, asked, model, whole=whole, specs=specs)

    # what has become of settings
    notes = [Note(*n.split(" ", 1)) for n in resolve_model(job.model)[1]]
    fallback = resolve_data(job.data)[1]
    if fallback:
        notes.append(Note(*fallback.split(" ", 1)))
    if job.debug.onerank:
        text = "true: parallel and launch.nproc are left out, micro batches kept"
        notes.append(Note("debug.onerank", text))
    notes += own_optimizer.note(traits)
    note = None
    if model.lost:
        text = f"true -> false: the constructor {model.lost}"
        note = Note("parallel.deferred_init", f"{text}; every rank builds the whole model once")
    traced = TracedModel(
        model.skeleton,
        seen.graph,
        whole,
        built_whole=note,
        operators=seen.operators,
        recomputed=seen.recomputed,
        pieces=seen.pieces,
        keeps_messages=keeps_messages(),
    )
    return plan(job, asked, traced, [*notes, *more], traits=traits)


def keeps_messages() -> bool:
    """Whether torch keeps what stages send each other until the step is over, as before 2.15."""
    import torch

    return torch.__version__ < "2.15"  # torch compares versions here, not letters


@dataclass(frozen=True)
class Followed:
    """One forward as a rank of ``tp`` runs it; ``pieces``: of sequences, where they are cut."""

    operators: Flow
    recomputed: tuple[Recomputed, ...]
    graph: Graph
    pieces: Pieces | None = None


def _settled(
    operators: Flow, recomputed: tuple[Recomputed, ...], graph: Graph, skeleton: Skeleton
) -> Followed:
    """With what runs again as ``graph`` allows it. Raises ``RequestError``."""
    recomputed, found = recompute.settled(recomputed, graph, skeleton)
    refuse(found)
    together = dict.fromkeys((*graph.recomputed, *(r.module for r in recomputed)))
    return Followed(operators, recomputed, replace(graph, recomputed=tuple(together)))


def _followed(
    job: Job,
    asked: Asked,
    built: _Model,
    *,
    whole: tuple[str, ...] | None,
    specs: tuple[TensorSpec, ...],
) -> Followed:
    """How the operators run, and what one rank of ``tp`` does; the model keeps that rank's weights."""
    from launcher.parallel.forward import recompute as again
    from launcher.parallel.model_state.deep_copy import copied
    from launcher.parallel.sequence import chunks
    from launcher.parallel.tensor_parallel import apply, propagate
    from launcher.parallel.tensor_parallel.collectives import Axis
    from launcher.parallel.trace import model_facts

    model, skeleton = built.module, built.skeleton
    tp, count = asked.sizes.grid["tp"], asked.sizes.pieces

    # what of the request fits this model
    operators, found = resolve(job.parallel.operators, skeleton, asked.sizes.grid)
    found = found or uncalled(operators, whole)
    recomputed, wrong = recompute.resolve(job.parallel.recompute, skeleton, whole)
    found += wrong
    if found := found or (chunks.problems(model, specs, count) if count > 1 else []):
        raise RequestError(tuple(found))

    # the model as one rank of tp runs it; pieces are followed on one that nothing was cut of
    bare = copied(model) if count > 1 else model
    out = propagate.follow(model, operators, tp, specs)
    apply.cut(model, splits([s.operator for s in out.spreads]), Axis(tp, planned=True))
    axis = Axis(tp, planned=True)
    apply.install(model, out.spreads, axis)
    again.install(model, recomputed, axis)

    # one forward of whole sequences
    if whole is None:
        return _settled(out, recomputed, model_facts.whole(model, specs), skeleton)
    leaves = frozenset(whole)
    graph = model_facts.graph(model, leaves, specs)
    if count == 1:
        return _settled(out, recomputed, graph, skeleton)

    # and one of their pieces
    split = job.parallel.pipeline.seq_split
    lengths = chunks.cut(model, leaves, specs, count, split=split, step=grain(out, tp))
    out = propagate.in_pieces(bare, out, tp, specs, lengths=lengths)
    seen = _settled(out, recomputed, graph, skeleton)
    return replace(seen, pieces=chunks.graphs(model, leaves, specs, graph, lengths=lengths))
