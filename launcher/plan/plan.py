"""The whole decision, made before anything runs: print it, compare it, store it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from launcher.errors import Problem, RequestError, refuse
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Hsdp
from launcher.plan import certify_copy, step_order
from launcher.plan.cost.fusion import Bucket, Fused, Group, buckets, groups, limits, sums
from launcher.plan.cost.gather_order import Visit, visits
from launcher.plan.cost.gather_order import notes as looking
from launcher.plan.cost.memory import Memory, copies, memory
from launcher.plan.cost.stage_loads import Cut, full
from launcher.plan.cost.traffic import Traffic, messages, traffic
from launcher.plan.operators.resolve import WHOLE, Flow, splits
from launcher.plan.partition import stage_config, stages
from launcher.plan.partition.params import Placed, Tie, placed, ties
from launcher.plan.partition.sequence_chunks import Pieces
from launcher.plan.partition.sizes import Note, Sizes, sizes
from launcher.plan.partition.stages import Crossing, Stage
from launcher.plan.refusals import evaluation, model_effects, own_optimizer
from launcher.plan.schedule import schedules  # fmt: skip
from launcher.plan.schedule.actions import Schedule
from launcher.plan.schedule.simulate import Cost, Timeline
from launcher.plan.settings import fit, legal, settings, speed_up, switches, transport
from launcher.plan.settings.auto_stage_config import automatic
from launcher.plan.settings.dataset_strategy import Hand, Reading, hands
from launcher.plan.settings.scheduler import choose
from launcher.plan.settings.settings import Setting
from launcher.plan.step_order import Phase
from launcher.plan.values.facts import Graph, Skeleton, TensorSpec
from launcher.plan.values.optimizer_traits import Traits
from launcher.plan.values.precision import Precision, precision
from launcher.plan.values.text import many

VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Everything that will happen. ``stages`` are virtual; ``boundaries[s]`` is what travels from stage s to s + 1.

    ``leaves`` are the modules that the glue is traced between; ``None`` when one stage runs the model as it is.
    ``pieces`` are the lengths in which sequences pass while training; empty when they pass whole.
    ``operators``: how modules are spread over ``tp``; ``sums`` are the gradients to add up over it once a step.
    ``output`` is what a rank has of the model's output.
    ``deferred``: parameters are made shard by shard; otherwise each rank builds the model once and keeps its shards.
    ``optimizer``: of a class of the user's own, what it was seen to do.
    ``restored``: parameters and buffers that a forward in evaluation mode changes, under all their names; ``unsteady``:
    those of them that its output depends on; ``mixed``: modules that then normalize over the samples of a micro batch.
    ``batch_dependent``: what is computed while training hangs on which samples are a micro batch.
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
    boundaries: tuple[tuple[Crossing, ...], ...]
    pieces: tuple[int, ...]
    inputs: tuple[TensorSpec, ...]
    output: tuple[TensorSpec, ...]
    params: tuple[Placed, ...]
    ties: tuple[Tie, ...]
    groups: tuple[Group, ...]
    visits: tuple[tuple[Visit, ...], ...]
    buckets: tuple[Bucket, ...]
    operators: Flow
    sums: tuple[Bucket, ...]
    schedule: Schedule
    evaluation: Schedule
    timeline: Timeline
    memory: tuple[Memory, ...]
    traffic: tuple[Traffic, ...]
    phases: tuple[Phase, ...]
    settings: tuple[Setting, ...]
    notes: tuple[Note, ...]
    deferred: bool
    gradients_mean: bool
    loss_reduction: str
    output_broadcast: bool
    reading: Reading
    loss_repeats: int
    optimizer: Traits | None
    restored: tuple[str, ...]
    unsteady: tuple[str, ...]
    mixed: tuple[str, ...]
    batch_dependent: bool

    def held(self, pp: int) -> tuple[Stage, ...]:
        """The virtual stages of one pipeline rank, in order."""
        return tuple(self.stages[s] for s in self.sizes.held(pp))

    @property
    def loss_terms(self) -> int:
        """Of how many means the loss is the sum: 1, or with ``loss_reduction`` sum one a micro batch."""
        return self.sizes.micros if self.loss_reduction == "sum" else 1

    def hands(self, rank: int) -> tuple[Hand, Hand]:
        """What ``rank`` does with the inputs of a batch, which the first stage uses, and with the last's targets."""
        home = {s.index: pp for pp in range(self.sizes.grid["pp"]) for s in self.held(pp)}
        return hands(self.reading, self.sizes.grid, home[0], home[len(self.stages) - 1], rank)


@dataclass(frozen=True)
class Asked:
    """What is known before the model is read: the sizes, the explicit stage of each module name, if any."""

    sizes: Sizes
    config: dict[str, int] | None


def ask(job: Job, found: list[Problem] | None = None) -> Asked:
    """All that can be decided, and refused, without a model. Raises ``RequestError`` with every problem at once."""
    found = list(found or ())
    found += settings.refused(job)
    got, wrong = sizes(job)
    found += wrong
    found += legal.illegal(job, got)
    found += step_order.check(job.steps)
    found += fit.unfit(job, got)
    found += switches.refused(job, got)
    if found or got is None:
        raise RequestError(tuple(found))
    config = job.parallel.pipeline.stage_config
    return Asked(got, None if config == "auto" else stage_config.flatten(config))


def impossible(asked: Asked) -> list[Problem]:
    """What a plan would refuse for any model."""
    config = asked.config or {}
    return stage_config.impossible(config, asked.sizes.grid["pp"], asked.sizes.chunks) if config else []


def leaves(asked: Asked, skeleton: Skeleton, stacks: bool = True) -> tuple[str, ...] | None:
    """The modules that stay whole, or ``None`` when there is one stage and nothing to cut.

    ``stacks``: automatic choices look into modules around layers.
    """
    if asked.sizes.virtual == 1 and asked.config is None:
        return None
    if asked.config is None:
        return stage_config.units(skeleton, asked.sizes.virtual, stacks)
    if found := stage_config.complaints(asked.config, skeleton, asked.sizes.grid["pp"], asked.sizes.chunks):
        raise RequestError(tuple(found))
    return None if asked.sizes.virtual == 1 else tuple(sorted(stage_config.leaves(asked.config, skeleton)))


def plan(
    job: Job, asked: Asked, skeleton: Skeleton, graph: Graph, whole: tuple[str, ...] | None, deferred: Note | None,
    notes: list[Note], flow: Flow = WHOLE, pieces: Pieces | None = None, traits: Traits | None = None,
) -> Plan:  # fmt: skip
    """The plan of ``job`` for a model with this skeleton and glue; ``deferred`` says why deferred init cannot be."""
    par, (cut, balanced) = job.parallel, _cut(job, asked, skeleton, graph, whole)
    lengths, graphs = (pieces.lengths, pieces.graphs) if pieces else ((), (graph,))
    order, kept = choose(job, asked.sizes, _cost(cut, graphs)), model_effects.whole(graph, asked.sizes)
    sz, dtypes, cuts = order.sizes, precision(job), splits([s.operator for s in flow.spreads])
    params = placed(skeleton, cut, sz, par.hsdp, cuts, dtypes.low, kept)
    boundaries, tied = tuple(stages.boundary(graph, cut, s.index) for s in cut), ties(params)
    hsdp, limit = par.hsdp if sz.grid["dp_shard"] > 1 else None, limits(par.comm_fusion)
    group, summed = groups(params, cut, skeleton, graph, limit), sums(params, cut, sz, frozenset(flow.partial))
    at = model_effects.Layout(sz, order.scheduler, cut, boundaries, params, dtypes.mixed, bool(cuts), group)
    bucket = buckets(params, cut, sz, limit, dtypes.reduce if dtypes.mixed else None)
    together = Fused(limit, params, group, bucket, summed, _learned(tied), order.late, flow.spreads)
    refuse([*_misled(job, at, skeleton, graph, traits), *speed_up.half_done(job, sz, together)])
    sent = traffic(sz, params, tied, group, together.sums, boundaries, order.schedule, hsdp, dtypes, lengths)
    moments = full(order.schedule, Cut(cut, graphs, boundaries, params, group, sz, dtypes), hsdp, together.sums)
    return Plan(
        name=job.name,
        seed=job.seed,
        precision=job.train.precision,
        dtypes=dtypes,
        sizes=sz,
        scheduler=order.scheduler,
        hsdp=hsdp,
        leaves=whole,
        stages=cut,
        boundaries=boundaries,
        pieces=lengths,
        inputs=tuple(t for n in graph.nodes if n.kind == "input" for t in n.out or ()),
        output=graph.nodes[-1].out or (),
        params=params,
        ties=tied,
        groups=group,
        visits=visits(group, len(cut), graph),
        buckets=bucket,
        operators=flow,
        sums=summed,
        schedule=order.schedule,
        evaluation=schedules.forward_only(sz.places, sz.micros),
        timeline=replace(order.timeline, messages=messages(sent, sz)),
        memory=memory(params, sz, copies(job.optim, traits), moments),
        traffic=sent,
        phases=step_order.phases(job.steps),
        settings=_settings(job, sz, dtypes, flow, together),
        loss_repeats=switches.repeats(job, sz, flow.output is not None),
        notes=(*notes, *sz.notes, *balanced, *order.notes, *_late(job, sz, params, skeleton, graph, deferred, kept)),
        optimizer=traits,
        restored=tuple(n for c in graph.effects.evaluated for n in c.names),
        unsteady=evaluation.unsteady(skeleton, graph),
        mixed=graph.effects.mixed,
        batch_dependent=bool(graph.effects.changes or graph.effects.mixed),
        deferred=par.deferred_init and deferred is None,
        gradients_mean=par.gradients_mean,
        loss_reduction=par.pipeline.loss_reduction,
        output_broadcast=par.pipeline.output_broadcast and sz.grid["pp"] > 1,
        reading=switches.reading_of(job, sz),
    )


def _misled(
    job: Job, at: model_effects.Layout, skeleton: Skeleton, graph: Graph, traits: Traits | None
) -> Iterator[Problem]:
    """What would get other numbers than one process, or shares other parameters than it is told."""
    yield from switches.unshared(job, at.params)
    yield from transport.problems(job, at.params)
    yield from model_effects.refused(at, skeleton, graph)
    yield from own_optimizer.problems(job, traits, at.params, at.sizes, graph)
    yield from evaluation.problems(job, skeleton, graph)


def _settings(job: Job, sz: Sizes, dtypes: Precision, flow: Flow, fused: Fused) -> tuple[Setting, ...]:
    loss = switches.resolve_loss(job, sz, flow.output is not None)
    return (*settings.resolve(job, sz, fused), *transport.settings(job, sz, dtypes, fused), *loss)


def _learned(tied: tuple[Tie, ...]) -> int:
    """How many are summed over stages each step."""
    return sum(t.trained and len(t.ranks) > 1 for t in tied)


def _late(
    job: Job, sz: Sizes, params: tuple[Placed, ...], skeleton: Skeleton, graph: Graph, deferred: Note | None,
    changed: frozenset[str],
) -> list[Note]:  # fmt: skip
    """What the finished plan has to say."""
    why = [*([deferred] if deferred else []), *model_effects.notes(params, sz, changed)]
    sharded = _sharding_notes(params, sz, job.parallel.hsdp, not job.parallel.comm_fusion.openstate)
    return [
        *why,
        *sharded,
        *looking(graph, params),
        *evaluation.notes(job, skeleton, graph),
        *fit.idle(job, sz.steps),
        *certify_copy.notes(job, sz),
    ]


def _cut(
    job: Job, asked: Asked, skeleton: Skeleton, graph: Graph, whole: tuple[str, ...] | None
) -> tuple[tuple[Stage, ...], list[Note]]:
    """The stages, and how they came about."""
    told, balanced = _told(job, asked, skeleton, graph, whole)
    at, found = stages.place(graph, told, asked.sizes.virtual - 1)
    cut: tuple[Stage, ...] = ()
    if not found:
        cut, found = stages.cut(graph, at, asked.sizes.virtual, skeleton)
    found = [_pasteable(p, asked.config or {}) for p in found] + _output(graph)
    if found:
        raise RequestError(tuple(found))
    return cut, balanced


def _pasteable(problem: Problem, config: dict[str, int]) -> Problem:
    """Without a cure that a deeper key of the request would outdo."""
    keys = [word.partition("=")[0].removeprefix(f"{stage_config.KEY}.") for word in problem.cure.split()]
    outdone = any(k.startswith(f"{key}.") for key in keys for k in config)
    return replace(problem, cure="") if outdone else problem


def _told(
    job: Job, asked: Asked, skeleton: Skeleton, graph: Graph, whole: tuple[str, ...] | None
) -> tuple[dict[str, int], list[Note]]:
    """The stage of each called module, and of each parameter in the glue, that has one."""
    called = list(dict.fromkeys(n.target for n in graph.nodes if n.kind == "module"))
    if whole is None:
        return dict.fromkeys(called, 0), []
    if asked.config is not None:
        glued = {n.target for n in graph.nodes if n.kind == "param"}
        return _as_asked(asked.config, called, glued, skeleton), []
    return automatic(job, asked.sizes, skeleton, graph, called)


def _as_asked(config: dict[str, int], called: list[str], glued: set[str], skeleton: Skeleton) -> dict[str, int]:
    """A module without a stage of its own is where its parameters are; a parameter counts only when it is named."""
    out: dict[str, int] = {}
    for m in called:
        inside = (stage_config.stage_of(config, p.name) for p in skeleton.params if stages.covers(m, p.name))
        stage = stage_config.stage_of(config, m)
        if (found := next(inside, None) if stage is None else stage) is not None:
            out[m] = found
    for name in sorted(glued):
        stage = stage_config.stage_of(config, name)
        if stage is not None and (name in config or not stage_config.owner(name)):
            out[name] = stage
    return out


def _output(graph: Graph) -> list[Problem]:
    last = graph.nodes[-1]
    if last.out is not None and not last.packed:
        return []
    what = "something that is no tensor" if last.out is None else f"a tuple of {many(len(last.out), 'tensor')}"
    cure = "return the logits alone, those of a dict or an object by their name, as in out.logits"
    return [Problem("model", f"its forward returns {what}, and the loss takes one tensor; {cure}")]


FLOPS_A_BYTE = 16
"""Operations in the time of writing one byte: about what CPUs and GPUs do in fp32."""


def _cost(cut: tuple[Stage, ...], graphs: tuple[Graph, ...]) -> Cost:
    """Time in flops: forward with the bytes its nodes write, backward twice that; transfers take none.

    ``graphs``: one, or one a piece.
    """
    both = [_forward(s, g) for s in cut for g in graphs]
    forward, saved = tuple(f for f, _ in both), tuple(n for _, n in both)
    late = [[g[n].backward for n in s.nodes] for s in cut for g in graphs]
    return Cost(
        forward,
        backward=tuple(2 * f for f in forward),
        activation=saved,
        weight=tuple(float(sum(b.deferred for b in bs)) for bs in late),
        waits=tuple(sum(b.kept for b in bs) for bs in late),
        pieces=len(graphs),
    )


def _forward(stage: Stage, graph: Graph) -> tuple[float, int]:
    """Time, and bytes kept for backward."""
    nodes = [graph[n] for n in stage.nodes]
    written = sum(t.nbytes for n in nodes if n.kind in ("module", "glue") for t in n.out or ())
    return float(max(sum(n.flops for n in nodes) + FLOPS_A_BYTE * written, 1)), sum(n.saved for n in nodes)


def _sharding_notes(params: tuple[Placed, ...], sz: Sizes, hsdp: Hsdp | None, alone: bool) -> list[Note]:
    if hsdp is None:
        return []
    if sz.grid["dp_shard"] == 1:
        return [Note("parallel.hsdp", "has no effect: the shard axis has one rank")]
    out = []
    small = sum(not p.sharded and p.trainable and p.spec.nbytes < hsdp.threshold * 1024 for p in params)
    if small:
        verb = "stays" if small == 1 else "stay"
        how = "each by itself" if alone else "together"
        text = f"{hsdp.threshold} KB: {many(small, 'smaller parameter')} {verb} whole, gradients are summed {how}"
        out.append(Note("parallel.hsdp.threshold", text))
    n = sz.grid["dp_shard"]
    ragged = [p.name for p in params if p.sharded and p.spec.shape[0] % n]
    if ragged:
        more = f" and {len(ragged) - 3} more" if len(ragged) > 3 else ""
        text = f"{', '.join(ragged[:3])}{more}: dim 0 is not a multiple of {n}, so the last ranks hold less or nothing"
        out.append(Note("parallel.hsdp.uneven", f"pad: {text}"))
    left = [p.name for p in params if hsdp.uneven == "whole" and p.trainable and p.spec.shape and p.spec.shape[0] % n]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        verb = "stays" if len(left) == 1 else "stay"
        text = f"{', '.join(left[:3])}{more} {verb} whole: dim 0 is not a multiple of {n}"
        out.append(Note("parallel.hsdp.uneven", f"whole: {text}"))
    return out
