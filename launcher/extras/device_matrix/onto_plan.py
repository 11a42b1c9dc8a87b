"""Adds sharded operators to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.errors import RequestError, refuse
from launcher.extras.device_matrix.given_layouts import KnownParams, over_stage
from launcher.extras.device_matrix.hsdp import global_layout, hsdp_setting
from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.resolve import Sharding, StageGraphs, StageSharding, Terms, resolve
from launcher.extras.device_matrix.rules.table import rule_of
from launcher.extras.device_matrix.search.cost import CostModel, on_cluster
from launcher.extras.device_matrix.show import gathered
from launcher.extras.device_matrix.step_memory import StageBytes, sharded_memory
from launcher.extras.device_matrix.traffic import sharded_traffic
from launcher.job.schema.components import foreign
from launcher.job.schema.job import Job
from launcher.plan.cut.stages import BoundaryTensor
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.memory.optimizer_state import StateSize
from launcher.plan.plan import Plan
from launcher.plan.refusals import model as model_refusals
from launcher.plan.resolve import transformer_opt
from launcher.plan.tensor_parallel.module_strategies import unwrapped
from launcher.plan.values.class_dims import class_dims
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.precision import DTYPE
from launcher.plan.values.resolved import Resolved
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import GB
from launcher.planner.loaded_param_layouts import laid_out
from launcher.planner.trace_model import ModelRead

if TYPE_CHECKING:
    from torch import Tensor, nn


def add_sharding(resolved: Resolved, made: Plan, sharding: Sharding, measured: Sequence[StageBytes]) -> Plan:
    """Returns ``made``, in which no tensor is sharded, with tensors sharded as ``sharding`` says.

    ``measured``: the bytes that each virtual stage keeps. Raises ``RequestError`` for operators on gathered
    tensors if ``strict`` forbids them.
    """
    job = resolved.job
    refuse(transformer_opt.gathered(job, map(str, gathered(sharding)), resolved.switches_file))
    params = tuple(_placed(p, made, sharding) for p in made.params)
    boundaries = tuple(
        tuple(_crossings(crossings, stage))
        for crossings, stage in zip(made.boundaries, sharding.stages, strict=True)
    )
    settings = (*made.settings, *hsdp_setting(job, sharding.params.values()))
    traffic = sharded_traffic(
        sharding,
        made.sizes,
        made.schedule,
        boundaries,
        params=params,
        ties=made.ties,
        regathered=[m.regathered for m in measured],
    )
    memory = sharded_memory(
        measured,
        boundaries,
        made.schedule,
        made.sizes,
        params=params,
        state=StateSize.from_job(job, made.observed.optimizer),
    )
    return replace(
        made,
        params=params,
        boundaries=boundaries,
        sharding=sharding,
        settings=settings,
        estimate=replace(made.estimate, traffic=traffic, memory=memory, step=None),
    )


def _placed(p: Placed, made: Plan, sharding: Sharding) -> Placed:
    layout = sharding.params.get(p.name)
    if layout is None:
        return p
    places = dict(p.layout.at)["pp"]
    return replace(p, layout=global_layout(layout.rest, p.spec, made.sizes.grid["pp"], places))


def _crossings(crossings: tuple[BoundaryTensor, ...], stage: StageSharding) -> Iterator[BoundaryTensor]:
    """Yields the shards of each boundary tensor that a rank sends."""
    parts = iter(stage.gives)
    for c in crossings:
        yield c.with_sent([next(parts) for _ in c.specs])


def shard_operators(resolved: Resolved, made: Plan, model: ModelRead, specs: Sequence[TensorSpec]) -> Plan:
    """Returns the plan ``made`` with the strategies of the request; ``model`` is the full model on meta.

    Raises ``RequestError``.
    """
    refuse([*model_refusals.recording_problems(model.skeleton)])
    job = resolved.job
    operators, origins, wrong = unwrapped(job.parallel.operators, model.skeleton, resolved.strategies)
    refuse(wrong)
    job = job.model_copy(update={"parallel": job.parallel.model_copy(update={"operators": operators})})
    resolved = replace(resolved, job=job, strategies=origins)
    from launcher.models.language_model import grouped_heads  # imports torch

    ours = not foreign(job.model)
    with grouped_heads(False):  # ranks record operators without a device as well
        graphs = [_named(g, made) for g in _graphs(made, model.module, specs, ours=ours)]
    terms = _terms(job, made)
    sharding = resolve(resolved, graphs, rule_of, terms, _known(job, made, model))
    return add_sharding(resolved, made, sharding, _measured(made, sharding, terms.class_dim))


def _known(job: Job, made: Plan, model: ModelRead) -> KnownParams | None:
    """Returns the layouts that a file prescribes for parameters."""
    file = laid_out(job, model.skeleton, made.sizes.grid.size)
    if file is None:
        return None
    firsts = {n: p.name for p in made.params for n in p.names}
    known = over_stage(file, firsts, made.sizes.grid["tp"])
    if isinstance(known, KnownParams):
        return known
    raise RequestError(tuple(known))


def _measured(made: Plan, sharding: Sharding, class_dim: int | None) -> list[StageBytes]:
    """Returns the bytes that each virtual stage keeps while it trains."""
    from launcher.extras.device_matrix.run.measure_stage import measure_stages

    loss = _loss(sharding.stages[-1], class_dim)
    kept = {p.name: p.spec.dtype for p in made.params}
    return measure_stages(sharding.stages, sharding.level, loss, kept, made.sizes.micros)


def _loss(stage: StageSharding, class_dim: int | None) -> Callable[[Tensor], Tensor]:
    """Returns the loss of a rank's part of the output, on meta tensors."""
    import torch

    from launcher.objective.losses import cross_entropy
    from launcher.parallel.tensor_parallel.collectives import Axis

    layout = stage.train.taken[stage.train.returns[0]].layout
    cut = layout.slices[-1] if layout.dims else 1
    parts = Axis(cut) if cut > 1 else None

    def loss(out: Tensor) -> Tensor:
        if class_dim is None:
            return out.sum()
        shape = [n for dim, n in enumerate(out.shape) if dim != class_dim]
        target = torch.empty(shape, dtype=torch.int64, device="meta")
        return cross_entropy(out, target, parts, "sum")

    return loss


def _terms(job: Job, made: Plan) -> Terms:
    """Returns the conditions for a search of strategies: how this job trains."""
    hsdp, gb = job.parallel.hsdp, job.cluster.memory_gb
    costs = CostModel(
        state_bytes=StateSize.from_job(job).of_matrix * ITEMSIZE[DTYPE[job.train.precision]],
        optimizer_level=0 if hsdp is None else int(hsdp.optimizer_level.removeprefix("level")),
        micro_batches=made.sizes.micros,
        in_flight=max(made.estimate.timeline.in_flight),
    )
    costs = on_cluster(costs, job, made.sizes.grid["tp"])
    network = job.parallel.comm_fusion.network
    if network is not None:
        costs = replace(costs, latency=network.latency_us / 1e6, bytes_per_second=network.gb_per_s * 1e9)
    memory = None if gb is None else gb * GB
    return Terms(made.sizes.grid["tp"], _class_dim(job, made), costs, memory)


def _class_dim(job: Job, made: Plan) -> int | None:
    """Returns the output's dim of classes, if the loss is one of classes and accepts shards of them."""
    from launcher.data.spec import target_spec

    if not made.objective.classes or made.objective.needs_full_output:
        return None
    target = target_spec(job.data, made.sizes.micro_batch, job.security.allow)
    dims = class_dims(made.output[0].shape, target.shape) if len(made.output) == 1 else ()
    return next(iter(dims), None)


def _named(graphs: StageGraphs, made: Plan) -> StageGraphs:
    """Renames every tensor to its first name in the full model."""
    first = {n: p.name for p in made.params for n in p.names}

    def renamed(graph: OpGraph) -> OpGraph:
        return replace(
            graph,
            params=tuple((first.get(n, n), v) for n, v in graph.params),
            buffers=frozenset(first.get(n, n) for n in graph.buffers),
            changes=tuple((first.get(n, n), v) for n, v in graph.changes),
        )

    return StageGraphs(renamed(graphs.train), renamed(graphs.evaluate))


def _graphs(made: Plan, model: nn.Module, specs: Sequence[TensorSpec], ours: bool) -> list[StageGraphs]:
    """Returns the graphs of each virtual stage.

    ``ours``: a model of this package, whose equal stages share one.
    """
    from launcher.extras.device_matrix.run.record_equal_modules import StageCode, renamed
    from launcher.parallel.model_state.deep_copy import copied
    from launcher.parallel.stages import split, stage_graph, traced

    model = copied(model)
    tracer = traced(model, made, tuple(specs))
    known: list[tuple[StageCode, StageGraphs]] = []
    out: list[StageGraphs] = []
    for stage in made.stages:
        inputs = _stage_inputs(made, stage.index, specs)
        code = None
        if ours and tracer is not None:
            code = StageCode.from_graph(model, stage_graph(tracer, stage, made), inputs)
            matches = ((both, other.names_of(code)) for other, both in known)
            like = next(((both, names) for both, names in matches if names is not None), None)
            if like is not None:
                both, names = like
                out.append(StageGraphs(renamed(both.train, names), renamed(both.evaluate, names)))
                continue
        parts = split(model, made, made.sizes.places[stage.index], tracer)
        (module,) = (p.module for p in parts if p.stage.index == stage.index)
        out.append(_recorded(module, inputs, ours=ours))
        if code is not None:
            known.append((code, out[-1]))
    return out


def _stage_inputs(made: Plan, index: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Returns the inputs of a stage, on meta."""
    from launcher.parallel.trace.tensor_specs import meta

    if not index:
        return list(meta(specs))
    crossings = made.boundaries[index - 1]
    return [
        t.requires_grad_(grad) for c in crossings for t, grad in zip(meta(c.sent), c.gradients, strict=True)
    ]


def _recorded(module: nn.Module, inputs: Sequence[Tensor], ours: bool) -> StageGraphs:
    """Records both modes. In our models only torch modules may behave differently in evaluation."""
    from launcher.extras.device_matrix.run.record import record as recorded
    from launcher.extras.device_matrix.run.record_equal_modules import record_ours
    from launcher.parallel.dispatch.training_mode import evaluating
    from launcher.parallel.trace.code_between_modules import modal

    record = record_ours if ours else recorded
    train = record(module, inputs)
    if ours and not modal(module):
        return StageGraphs(train, train)
    with evaluating([module]):
        other = record(module, inputs)
    return StageGraphs(train, train if other == train else other)
