"""The plan: every decision about a run, made before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.errors import Problem, RequestError, refuse
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Hsdp
from launcher.job.schema.train import Ema
from launcher.optional import matrices
from launcher.plan import certify_copy, resolve, step_order
from launcher.plan.balance.part_times import Rerun, rerun, step_time
from launcher.plan.communication import gather_order
from launcher.plan.communication.buckets_and_gathers import (
    Bucket,
    Communication,
    GatherGroup,
    buckets,
    groups,
    sums,
)
from launcher.plan.communication.gather_order import AHEAD, Gathering, Visit, gatherings, visits
from launcher.plan.cut import param_groups, stages, uncut_modules
from launcher.plan.cut.stages import BoundaryTensor, Stage
from launcher.plan.cut.tensor_placement import Placed, Tie, placed, ties
from launcher.plan.cut.traced_model import TracedModel
from launcher.plan.cut_model import CutModel
from launcher.plan.drill import DrillFault
from launcher.plan.memory import fits_cluster
from launcher.plan.memory.optimizer_state import StateSize
from launcher.plan.memory.rank_loads import RankLoad, rank_loads
from launcher.plan.memory.rank_memory import Memory, memory
from launcher.plan.refusals import evaluation, optimizer, random_draws
from launcher.plan.refusals import model as model_refusals
from launcher.plan.resolve import (
    checkpoint,
    comm_fusion,
    compile,
    dataset_strategy,
    gradients,
    hsdp,
    loss,
    pipeline,
    steps,
    transformer_opt,
)
from launcher.plan.resolve import stage_config as stage_config_setting
from launcher.plan.resolve.dataset_strategy import BatchReading, BatchRole, roles
from launcher.plan.resolve.loss import Objective
from launcher.plan.resolve.pipeline import ScheduleChoice
from launcher.plan.resolve.stage_config import StageRequest
from launcher.plan.schedule import schedules
from launcher.plan.schedule.schedules import Schedule
from launcher.plan.schedule.simulate import Timeline
from launcher.plan.sizes import Sizes
from launcher.plan.step_order import Phase
from launcher.plan.tensor_parallel.module_strategies import splits
from launcher.plan.tensor_parallel.sharded_operators import TensorParallelPlan
from launcher.plan.time import step_work as work_of_step
from launcher.plan.time.prediction import Prediction, predict
from launcher.plan.time.speeds import speeds
from launcher.plan.time.step_work import StepWork, step_flops, step_work
from launcher.plan.time.traffic import Traffic, messages, scatters, traffic
from launcher.plan.values.compilation import Compilation
from launcher.plan.values.model_graph import EmbeddingLookup, Graph, ModelStructure
from launcher.plan.values.note import Note
from launcher.plan.values.optimizer import OptimizerTraits, ParamGroup
from launcher.plan.values.precision import Precision, precision
from launcher.plan.values.recomputed_module import Recomputed
from launcher.plan.values.resolved import EngineChoice, SwitchesFile
from launcher.plan.values.setting import Setting
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.training_summary import TrainingSummary, training

VERSION = 1


@dataclass(frozen=True)
class Estimate:
    """What a step will cost: simulated, and counted on meta tensors. Nothing that runs depends on it.

    ``flops`` are those of all ranks together. ``loads`` has one entry per pipeline rank; ``memory`` is
    computed from it. ``room`` is the memory of a rank's device in bytes, if the request states it. ``work``
    is everything that a step has to do; ``step`` predicts its time, if the request states the speeds of the
    hardware.
    """

    timeline: Timeline
    memory: tuple[Memory, ...]
    traffic: tuple[Traffic, ...]
    flops: int
    rerun: tuple[Rerun, ...]
    loads: tuple[RankLoad, ...]
    room: int | None
    work: StepWork
    step: Prediction | None

    @property
    def simulated(self) -> Timeline:
        """The timeline in seconds if they are predicted, else in a time without unit."""
        if self.step is None:
            return self.timeline
        return replace(self.step.timeline, messages=self.timeline.messages)


@dataclass(frozen=True)
class Observed:
    """What the model and the optimizer did when the planner tried them.

    ``optimizer`` describes the user's optimizer class; ``None`` for one of ours. ``changed`` are parameters
    and buffers that a forward in training changes, ``restored`` those that one in evaluation mode changes,
    under all their names. ``moves``: a forward in evaluation mode changes Python state. ``unsteady`` is the
    state that evaluation changes and that its next forward depends on. ``mixed`` are modules that normalize
    over the samples of a micro batch in evaluation mode. ``batch_dependent``: training depends on which
    samples share a micro batch. ``lookups`` are inputs that index tables; each batch is checked against them.
    """

    optimizer: OptimizerTraits | None
    changed: tuple[str, ...]
    restored: tuple[str, ...]
    moves: bool
    unsteady: tuple[str, ...]
    mixed: tuple[str, ...]
    batch_dependent: bool
    reads_values: bool = False
    lookups: tuple[EmbeddingLookup, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything that will happen.

    ``stages`` are virtual; ``boundaries[s]`` is what stage s sends to stage s + 1. ``leaves`` are the modules
    that the glue is traced between; ``None`` if one stage runs the model as it is. ``pieces`` are the lengths
    of the chunks of a sequence in training; empty if sequences are not cut. ``param_groups`` are the
    parameters that the optimizer updates with the same settings. ``operators`` says how modules are sharded
    over ``tp``; ``sharding`` how operators are cut over device matrices of all ranks of ``tp``, if they are.
    ``recomputed`` are the modules that run again in the backward, ``compilation`` those that torch compiles.
    ``sums`` are the gradients to sum over ``tp``; ``gathers`` is what each pipeline rank gathers once a step.
    ``reduces_early``: gradients reduced once a step are sent while the last backward still runs.
    ``overlaps`` lists the communication that overlaps with computation. ``output`` is a rank's part of the
    output; ``output_keys`` are its keys if it has several tensors. ``graph`` is for display. ``drill`` is a
    fault to inject.
    """

    name: str
    seed: int
    precision: str
    dtypes: Precision
    sizes: Sizes
    scheduler: str
    hsdp: Hsdp | None
    leaves: tuple[str, ...] | None
    stages: tuple[Stage, ...]
    boundaries: tuple[tuple[BoundaryTensor, ...], ...]
    pieces: tuple[int, ...]
    inputs: tuple[TensorSpec, ...]
    output: tuple[TensorSpec, ...]
    output_keys: tuple[str | int, ...]
    params: tuple[Placed, ...]
    param_groups: tuple[ParamGroup, ...]
    ties: tuple[Tie, ...]
    groups: tuple[GatherGroup, ...]
    visits: tuple[tuple[Visit, ...], ...]
    gathers: tuple[tuple[Gathering, ...], ...]
    buckets: tuple[Bucket, ...]
    scatters: tuple[Bucket, ...]
    reduces_early: bool
    overlaps: tuple[str, ...]
    operators: TensorParallelPlan
    recomputed: tuple[Recomputed, ...]
    compilation: Compilation | None
    sums: tuple[Bucket, ...]
    schedule: Schedule
    evaluation: Schedule
    phases: tuple[Phase, ...]
    settings: tuple[Setting, ...]
    notes: tuple[Note, ...]
    deferred: bool
    ema: Ema | None
    gradients_mean: bool
    loss_reduction: str
    output_broadcast: bool
    reading: BatchReading
    objective: Objective
    training: TrainingSummary | None
    loss_repeats: int
    observed: Observed
    estimate: Estimate
    sharding: matrices.Sharding | None = None
    graph: Graph | None = None
    drill: DrillFault | None = None

    def stages_of(self, pp: int) -> tuple[Stage, ...]:
        """Returns the virtual stages of one pipeline rank, in order."""
        return tuple(self.stages[s] for s in self.sizes.stages_of(pp))

    @property
    def loss_terms(self) -> int:
        """The number of means that the loss sums: 1, or one per micro batch if ``loss_reduction`` is sum."""
        return self.sizes.micros if self.loss_reduction == "sum" else 1

    def batch_roles(self, rank: int) -> tuple[BatchRole, BatchRole]:
        """Returns what ``rank`` does with the inputs and the targets.

        The first stage uses the inputs, the last one the targets.
        """
        places = self.sizes.places
        return roles(self.reading, self.sizes.grid, first=places[0], last=places[-1], rank=rank)


def ask(
    job: Job,
    problems: Sequence[Problem] = (),
    switches_file: SwitchesFile | None = None,
    engine: EngineChoice | None = None,
) -> StageRequest:
    """Decides everything that needs no model; ``problems`` are known already.

    ``switches_file``: the file that has switches of ``transformer_opt``. ``engine``: how operators are cut,
    if files or the model decided it. Raises ``RequestError`` with every problem at once.
    """
    sizes, wrong = resolve.sizes(job, switches_file, engine)
    if problems or wrong or sizes is None:
        raise RequestError((*problems, *wrong))
    config = job.parallel.pipeline.stage_config
    flat = None if config == "auto" else stage_config_setting.flatten(config)
    return StageRequest(sizes, flat, switches_file=switches_file)


def impossible(request: StageRequest) -> list[Problem]:
    """Returns the problems that a plan would report for any model."""
    config = request.config or {}
    return (
        stage_config_setting.impossible(config, request.sizes.grid["pp"], request.sizes.chunks)
        if config
        else []
    )


def leaves(request: StageRequest, skeleton: ModelStructure, stacks: bool = True) -> tuple[str, ...] | None:
    """Returns the modules that stages do not cut, or ``None`` if there is only one stage.

    ``stacks``: automatic choices look into modules that contain layers. Raises ``RequestError`` if
    ``stage_config`` does not fit the model.
    """
    sizes, config = request.sizes, request.config
    if config is None:
        return uncut_modules.units(skeleton, sizes.virtual, stacks) if sizes.virtual > 1 else None
    refuse(stage_config_setting.complaints(config, skeleton, sizes.grid["pp"], sizes.chunks))
    return tuple(sorted(uncut_modules.leaves(config, skeleton))) if sizes.virtual > 1 else None


def plan(
    job: Job,
    request: StageRequest,
    model: TracedModel,
    notes: Sequence[Note] = (),
    traits: OptimizerTraits | None = None,
) -> Plan:
    """Returns the plan of ``job`` for ``model``; raises ``RequestError`` with every problem at once.

    ``traits``: what the user's optimizer class did when it was tried.
    """
    cut, balanced = stage_config_setting.cut(job, request, model, StateSize.from_job(job, traits))
    order = pipeline.choose(job, request.sizes, step_time(cut, model.graphs))
    at = _layout(job, model, cut, order)
    compilation, wrong = compile.resolve(job, model, at)
    at = work_of_step.with_compilation(at, compilation)
    fused = _fused(job, model, at, order, compilation)
    half_done = transformer_opt.param_problems(job, at.sizes, fused, request.switches_file)
    refuse([*_request_problems(job, model, at, traits), *half_done, *wrong])
    estimate = _estimate(job, at, fused, timeline=order.timeline, traits=traits)
    return Plan(
        name=job.name,
        seed=job.seed,
        precision=job.train.precision,
        dtypes=at.dtypes,
        sizes=at.sizes,
        scheduler=order.scheduler,
        hsdp=at.hsdp,
        leaves=model.leaves,
        stages=cut,
        boundaries=at.boundaries,
        pieces=model.lengths,
        inputs=tuple(t for n in model.graph.nodes if n.kind == "input" for t in n.out or ()),
        output=model.graph.nodes[-1].out or (),
        output_keys=model.graph.nodes[-1].keys,
        params=at.params,
        param_groups=param_groups.param_groups(job.optim, at.params),
        ties=at.ties,
        groups=fused.groups,
        visits=at.visits,
        gathers=tuple(_gathers(job, at, model.graph)),
        buckets=fused.buckets,
        scatters=fused.scatters,
        reduces_early=transformer_opt.reduces_early(job),
        overlaps=transformer_opt.overlaps(job, at.sizes, fused),
        operators=_operators(job, model, fused),
        recomputed=model.recomputed,
        compilation=compilation,
        sums=fused.terms,
        schedule=order.schedule,
        evaluation=schedules.forward_only(at.sizes.places, at.sizes.micros),
        phases=step_order.phases(job.steps),
        settings=tuple(resolve.rows(job, at.sizes, fused, model.recomputed)),
        notes=(*notes, *at.sizes.notes, *balanced, *order.notes, *_late(job, model, at, estimate.step)),
        deferred=job.parallel.deferred_init and model.built_unsharded is None,
        ema=job.train.ema,
        gradients_mean=job.parallel.gradients_mean,
        loss_reduction=job.parallel.pipeline.loss_reduction,
        output_broadcast=job.parallel.pipeline.output_broadcast and at.sizes.grid["pp"] > 1,
        reading=dataset_strategy.reading(job, at.sizes),
        objective=loss.objective(job),
        training=_training(job, order.sizes, estimate),
        loss_repeats=gradients.repeats(job, at.sizes, fused.loss_cut),
        observed=_observed(model, traits),
        estimate=estimate,
    )


def _training(job: Job, sizes: Sizes, estimate: Estimate) -> TrainingSummary | None:
    tokens = estimate.work.tokens
    return training(job, batch=sizes.global_batch, tokens=tokens, steps=sizes.steps, epochs=sizes.epochs)


def _layout(job: Job, model: TracedModel, cut: tuple[Stage, ...], order: ScheduleChoice) -> CutModel:
    """Places parameters on stages and ranks, in groups that one collective gathers."""
    par = job.parallel
    sizes = order.sizes
    dtypes = precision(job)

    # what FSDP2 shards depends on what is cut over tp and on what must not be sharded
    over_tp = splits([s.operator for s in model.operators.spreads])
    kept = model_refusals.changed_tensors(model.graph, sizes)
    params = placed(model.skeleton, cut, sizes, par.hsdp, splits=over_tp, low=dtypes.low, unsharded=kept)
    together = groups(params, cut, model.skeleton, model.graph, limits=comm_fusion.limits(job))
    return CutModel(
        sizes=sizes,
        dtypes=dtypes,
        hsdp=par.hsdp if sizes.grid["dp_shard"] > 1 else None,
        scheduler=order.scheduler,
        schedule=order.schedule,
        stages=cut,
        graphs=model.graphs,
        lengths=model.lengths,
        boundaries=tuple(
            stages.boundary(model.graph, cut, s.index, as_indexed=bool(model.lengths)) for s in cut
        ),
        params=params,
        ties=ties(params),
        groups=together,
        visits=visits(together, len(cut), model.graph),
        tp=bool(over_tp),
        keeps_messages=model.keeps_messages,
    )


def _fused(
    job: Job, model: TracedModel, at: CutModel, order: ScheduleChoice, compilation: Compilation | None
) -> Communication:
    """Decides which tensors are sent in one collective."""
    limits = comm_fusion.limits(job)
    return Communication(
        limits=limits,
        params=at.params,
        groups=at.groups,
        buckets=buckets(
            at.params, at.stages, at.sizes, limits, reduce=at.dtypes.reduce if at.mixed else None
        ),
        scatters=scatters(at, limits.scatter),
        terms=sums(at.params, at.stages, at.sizes, frozenset(model.operators.partial)),
        tied=sum(t.trained and len(t.ranks) > 1 for t in at.ties),
        late=order.late,
        spreads=model.operators.spreads,
        loss_cut=model.operators.output is not None,
        compiled=() if compilation is None else compilation.modules,
    )


def _operators(job: Job, model: TracedModel, fused: Communication) -> TensorParallelPlan:
    """Returns the operators that are cut over ``tp``, with the switches of ``transformer_opt`` applied."""
    swaps, overlapped = transformer_opt.swaps_bias(job), transformer_opt.overlapped(job, fused)
    return replace(model.operators, bias_in_terms=swaps, overlapped=overlapped)


def _gathers(job: Job, at: CutModel, graph: Graph) -> Iterator[tuple[Gathering, ...]]:
    """Yields what each pipeline rank gathers once a step, and how far ahead of its use."""
    each_time = at.hsdp is None or at.hsdp.optimizer_level == "level3"
    ahead = AHEAD if transformer_opt.gathers_ahead(job) else None
    for pp in range(at.sizes.grid["pp"]):
        yield gatherings(
            at.groups, at.visits, () if each_time else at.sizes.stages_of(pp), ahead, graph.other_parameters
        )


def _request_problems(
    job: Job, model: TracedModel, at: CutModel, traits: OptimizerTraits | None
) -> Iterator[Problem]:
    """Yields the reasons why a run would train other numbers than one process, or not shard as requested."""
    yield from resolve.param_problems(job, at.params)
    yield from model_refusals.untrained(job, model.skeleton, model.graph)
    yield from model_refusals.layout_problems(job, at, model.skeleton, model.graph, model.recomputed)
    yield from model_refusals.id_problems(job, model.graph)
    yield from optimizer.problems(job, traits, at, model.graph)
    yield from model_refusals.problems(job, at.params, model.graph)
    yield from evaluation.evaluation_problems(job, model.skeleton, model.graph)
    yield from random_draws.problems(job, model.graph.effects, at.sizes.pieces)


def _estimate(
    job: Job, at: CutModel, fused: Communication, *, timeline: Timeline, traits: OptimizerTraits | None
) -> Estimate:
    """Estimates what a step costs; ``timeline`` is that of the schedule, without messages."""
    sent = traffic(at, fused)
    loads = rank_loads(at, fused.sums, transformer_opt.reduces_early(job) and fused.limits.scatter is None)
    rows = memory(at.params, at.sizes, StateSize.from_job(job, traits), tuple(load.fullest for load in loads))
    flops = step_flops(at.graphs, at.sizes)
    work, fast = step_work(at, fused, rows, flops), speeds(job)
    return Estimate(
        timeline=replace(timeline, messages=messages(sent, at.sizes)),
        memory=rows,
        traffic=sent,
        flops=flops,
        rerun=tuple(rerun(stage, at.graphs) for stage in at.stages),
        loads=loads,
        room=fits_cluster.room(job),
        work=work,
        step=None if fast is None else predict(work, fast),
    )


def _observed(model: TracedModel, traits: OptimizerTraits | None) -> Observed:
    effects = model.graph.effects
    return Observed(
        optimizer=traits,
        changed=tuple(n for c in effects.changes for n in c.names),
        restored=tuple(n for c in effects.evaluated for n in c.names),
        moves=effects.eval_changes_state,
        unsteady=evaluation.unsteady(model.skeleton, model.graph),
        mixed=effects.mixed,
        batch_dependent=bool(effects.changes or effects.mixed),
        reads_values=bool(model.graph.value_readers),
        lookups=effects.lookups,
    )


def _late(job: Job, model: TracedModel, at: CutModel, step: Prediction | None) -> list[Note]:
    """Returns the notes that need the finished plan."""
    return [
        *([model.built_unsharded] if model.built_unsharded else []),
        *model_refusals.notes(at.params, at.sizes, model_refusals.changed_tensors(model.graph, at.sizes)),
        *model_refusals.remarks(job, model.skeleton, model.graph, at, model.recomputed),
        *hsdp.notes(job, at.sizes, at.params),
        *gather_order.notes(model.graph, at.params),
        *model_refusals.lora_notes(job, at.params),
        *param_groups.notes(job.optim, at.params),
        *evaluation.notes(job, model.skeleton, model.graph),
        *steps.idle(job, at.sizes.steps),
        *(checkpoint.unsaved(job, at.sizes.steps, step.seconds) if step is not None else ()),
        *certify_copy.notes(job, at.sizes),
        *random_draws.notes(job, model.graph.effects, at.sizes),
        *compile.notes(at.compilation),
    ]
