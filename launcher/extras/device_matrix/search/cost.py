"""The cost of strategies: a sum over operators and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import gcd, lcm, log, prod

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_graph import OpGraph, OpNode, Value
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.redistribution import redistribution
from launcher.extras.device_matrix.search.operator_work import forward_flops, is_view, reads
from launcher.job.schema.job import Job
from launcher.plan.time.speeds import speeds
from launcher.plan.values.dtypes import WIDTH

EXACT = 64
"""Smaller redistributions, in elements per part, have the cost of their exact size.

The sizes of larger ones are rounded, so that tensors of about the same size share one cached cost.
"""


@dataclass(frozen=True)
class CostModel:
    """The speeds of a rank, and how it trains.

    The default speeds are those of an accelerator of 2023 at half utilization, eight on a switch.
    ``latency``: seconds until a collective moves its first byte. ``state_bytes``: bytes of optimizer state
    per element. ``optimizer_level``: that of hsdp over the ranks that would repeat a parameter; 0 is off.
    ``in_flight``: the number of micro batches whose activations are kept at once.
    """

    flops_per_second: float = 4e14
    bytes_per_second: float = 5e10
    memory_bytes_per_second: float = 2e12
    latency: float = 1e-5
    state_bytes: int = 8
    optimizer_level: int = 0
    micro_batches: int = 1
    in_flight: int = 1

    def transfer(self, nbytes: float, collectives: int) -> float:
        """Returns the seconds of ``collectives`` that move ``nbytes`` bytes in total."""
        return nbytes / self.bytes_per_second + collectives * self.latency


@dataclass(frozen=True)
class RankBytes:
    """The bytes on a rank."""

    parameters: float = 0
    gradients: float = 0
    states: float = 0
    activations: float = 0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.states + self.activations

    def __add__(self, other: RankBytes) -> RankBytes:
        return RankBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.states + other.states,
            self.activations + other.activations,
        )


@dataclass(frozen=True)
class StepCost:
    """The cost of one step.

    In seconds: ``communication`` of activations, ``gradients`` (their sums, and gathers of parameters) and
    ``computation``. ``moved``: the bytes that a rank receives for activations; ``collectives``: the number of
    collectives for them.
    """

    communication: float = 0
    gradients: float = 0
    computation: float = 0
    moved: float = 0
    collectives: int = 0
    memory: RankBytes = field(default_factory=RankBytes)

    @property
    def predicted(self) -> float:
        """The seconds of a step without any overlap."""
        return self.communication + self.gradients + self.computation

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.communication + other.communication,
            self.gradients + other.gradients,
            self.computation + other.computation,
            self.moved + other.moved,
            self.collectives + other.collectives,
            self.memory + other.memory,
        )


@lru_cache(maxsize=1 << 18)
def port(rule: OpRule | None, strategy: OpStrategy, place: int, dims: int) -> TensorLayout:
    """Returns the layout that an operator requires for argument ``place``; partial if its gradient is one."""
    if rule is None:
        return TensorLayout.replicated(dims, prod(strategy.matrix)).canonical
    taken = strategy.takes(rule, place)
    return TensorLayout(taken.matrix, taken.dims, strategy.gradient_terms(rule, place)).canonical


@lru_cache(maxsize=1 << 18)
def made(rule: OpRule | None, strategy: OpStrategy, place: int, dims: int) -> TensorLayout:
    """Returns the layout of an operator's output ``place``."""
    if rule is None:
        return TensorLayout.replicated(dims, prod(strategy.matrix)).canonical
    return strategy.makes(rule, place).canonical


def redistribution_cost(
    src: TensorLayout, dst: TensorLayout, shape: tuple[int, ...], itemsize: int
) -> tuple[float, int]:
    """Returns the elements that a rank receives, and the number of collectives.

    The cost depends on how dims are cut, but not on which dims these are or on their lengths. So a move is
    planned once for all tensors of about the same size.
    """
    if src == dst or 0 in shape:
        return 0, 0
    cut = [(a, b) for a, b in zip(src.dims, dst.dims, strict=True) if a or b]
    cut.sort()
    first = TensorLayout(src.matrix, tuple(a for a, _ in cut), src.partial)
    second = TensorLayout(dst.matrix, tuple(b for _, b in cut), dst.partial)
    parts = prod(map(lcm, src.slices, dst.slices))
    scale = prod(shape) // parts
    about = scale if scale < EXACT else 4 ** round(log(scale, 4))
    elements, collectives = _moved(first, second, about, itemsize)
    return elements * scale / about, collectives


@lru_cache(maxsize=1 << 18)
def _moved(src: TensorLayout, dst: TensorLayout, scale: int, itemsize: int) -> tuple[int, int]:
    """Plans the move of a tensor that is ``scale`` times as large as the smallest one that both can cut."""
    shape = (scale, *map(lcm, src.slices, dst.slices))
    longer = [TensorLayout(x.matrix, ((), *x.dims), x.partial) for x in (src, dst)]
    plan = redistribution(longer[0], longer[1], shape, itemsize)
    return plan.elements, plan.collectives


@lru_cache(maxsize=1 << 18)
def move_cost(src: TensorLayout, taken: TensorLayout, value: Value, model: CostModel) -> StepCost:
    """Returns the cost of a redistribution and its backward.

    It counts for all operators that take ``value`` as ``taken``. ``taken`` is a layout that ``port`` returns.
    """
    itemsize, dst = WIDTH[value.spec.dtype], taken.summed().canonical
    elements, collectives = redistribution_cost(src, dst, value.shape, itemsize)
    kept = 0.0
    if value.trains:
        back, again = redistribution_cost(taken, src.summed().canonical, value.shape, itemsize)
        elements, collectives = elements + back, collectives + again
        kept = local_bytes(value, dst) if src != dst else 0.0
    nbytes = elements * itemsize
    return StepCost(
        communication=model.transfer(nbytes, collectives) * model.micro_batches,
        moved=nbytes * model.micro_batches,
        collectives=collectives * model.micro_batches,
        memory=RankBytes(activations=kept * model.in_flight),
    )


def local_bytes(value: Value, layout: TensorLayout) -> float:
    return value.spec.nbytes / prod(layout.slices)


@cache
def parameter_cost(taken: TensorLayout, value: Value, model: CostModel) -> StepCost:
    """Returns the cost of a parameter stored as ``taken`` (from ``port``): memory, and the gradient's sum.

    The sum of many gradients is one collective, so no latency is added for each. With hsdp, the ranks that
    would repeat the parameter have shards of dim 0, as many as divide it.
    """
    local = local_bytes(value, taken)
    if not value.trains:
        return StepCost(memory=RankBytes(parameters=local))

    # the ranks that sum terms, and the ranks that would keep the same part
    terms = prod(taken.matrix[a] for a in taken.partial)
    replicas = taken.ranks // prod(taken.slices)
    rows = taken.local_shape(value.shape)[0] if value.shape else 1
    level = model.optimizer_level
    shards = gcd(rows, replicas) if level else 1

    # a reduce-scatter and an all-gather, which are the halves of an all-reduce; level 3 gathers at each use
    scattered = (terms - 1) / terms
    gathers = (2 * model.micro_batches if level == 3 else 1) * (shards - 1) / shards if level else scattered
    states = value.spec.nbytes / WIDTH[value.spec.dtype] * model.state_bytes / prod(taken.slices)
    return StepCost(
        gradients=model.transfer(local * (scattered + gathers), 0),
        memory=RankBytes(
            parameters=local / (shards if level >= 3 else 1),
            gradients=local / (shards if level >= 2 else 1),
            states=states / shards,
        ),
    )


def node_cost(
    graph: OpGraph, node: OpNode, rule: OpRule | None, strategy: OpStrategy, model: CostModel
) -> StepCost:
    """Returns an operator's own cost: computation, collectives inside of it, activations that it makes."""
    backward = sum(graph.values[v].trains for v in node.ins)
    dims = [len(shape) for shape in graph.shapes(node)]
    ins = [port(rule, strategy, p, n) for p, n in enumerate(dims)]
    outs = [made(rule, strategy, p, len(s)) for p, s in enumerate(graph.makes(node))]
    view = is_view(graph, node)

    # flops, divided among the ranks that do not repeat, or bytes in and out, whichever takes longer
    ways = 1 if rule is None else prod(strategy.matrix[a] for a in strategy.used)
    flops = forward_flops(graph, node) / ways * (1 + (min(backward, 2) if backward else 0))
    nbytes = 0.0
    if not view:
        nbytes = sum(n / prod(x.slices) for n, x in zip(reads(graph, node), ins, strict=True))
        nbytes += sum(local_bytes(graph.values[v], x) for v, x in zip(node.outs, outs, strict=True))
        nbytes *= 3 if backward else 1
    seconds = max(flops / model.flops_per_second, nbytes / model.memory_bytes_per_second)

    # outputs are kept for backward, except terms of a sum, which are summed first
    kept = 0.0
    if backward and not view:
        kept = sum(
            local_bytes(graph.values[v], x)
            for v, x in zip(node.outs, outs, strict=True)
            if graph.values[v].trains and not x.partial
        )
    inside, collectives = _inside(graph, node, rule, strategy)
    return StepCost(
        communication=model.transfer(inside, collectives) * model.micro_batches,
        computation=seconds * model.micro_batches,
        moved=inside * model.micro_batches,
        collectives=collectives * model.micro_batches,
        memory=RankBytes(activations=kept * model.in_flight),
    )


def _inside(graph: OpGraph, node: OpNode, rule: OpRule | None, strategy: OpStrategy) -> tuple[float, int]:
    """Returns the bytes and number of the all-reduces inside of an operator, in a forward and a backward.

    Each all-reduce carries the first input, reduced over the sharded ``inside`` letters.
    """
    cut = [] if rule is None else [x for x in rule.inside if strategy.of.get(x)]
    if rule is None or not cut:
        return 0, 0
    ranks = prod(strategy.matrix[a] for x in cut for a in strategy.of[x])
    spec = graph.values[node.ins[0]].spec
    ways = prod(strategy.takes(rule, 0).slices)
    reduced = rule.inside if node.kind == "batch_norm" else cut
    reduced_bytes = spec.nbytes / ways / prod(rule.size[x] / strategy.slices(x) for x in reduced)
    rounds = 2 if graph.values[node.outs[0]].trains else 1
    return 2 * (ranks - 1) / ranks * reduced_bytes * rounds, rounds


def uses(graph: OpGraph) -> Mapping[int, Sequence[tuple[int, int]]]:
    """Returns the nodes that take each value, with the place of the argument, in execution order."""
    places: dict[int, list[tuple[int, int]]] = {}
    for at, node in enumerate(graph.nodes):
        for place, v in enumerate(node.ins):
            places.setdefault(v, []).append((at, place))
    return places


@dataclass(frozen=True)
class Layouts:
    """Layouts that a search must keep: those in which values ``rest``, and in which outputs ``leave``."""

    rest: Mapping[int, TensorLayout] = field(default_factory=dict)
    leave: Mapping[int, TensorLayout] = field(default_factory=dict)


def fixed_layouts(graph: OpGraph, ranks: int, requested: Layouts) -> Layouts:
    """Returns the requested layouts, and those of buffers.

    Buffers are replicated on every rank, also after a forward has changed them.
    """
    rest = {v: layout.canonical for v, layout in requested.rest.items()}
    leave = {v: layout.canonical for v, layout in requested.leave.items()}
    named = dict(graph.params)
    for name in sorted(graph.buffers):
        rest[named[name]] = TensorLayout.replicated(len(graph.values[named[name]].shape), ranks).canonical
    for _, v in graph.changes:
        leave[v] = TensorLayout.replicated(len(graph.values[v].shape), ranks).canonical
    return Layouts(rest, leave)


def graph_cost(
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    strategies: Sequence[OpStrategy],
    model: CostModel,
    requested: Layouts | None = None,
) -> StepCost:
    """Returns the cost of a graph.

    Inputs without a fixed layout arrive in the layout of each user, at no cost; parameters rest in the layout
    of their first user.
    """
    ranks = prod(strategies[0].matrix) if strategies else 1
    fixed = fixed_layouts(graph, ranks, requested or Layouts())
    total, taken = StepCost(), _ports(graph, rules, strategies)
    for node, rule, strategy in zip(graph.nodes, rules, strategies, strict=True):
        total += node_cost(graph, node, rule, strategy, model)
        for place, v in enumerate(node.outs):
            layout = made(rule, strategy, place, len(graph.values[v].shape))
            ways = [*taken.get(v, ()), *([fixed.leave[v]] if v in fixed.leave else ())]
            if ways or v in graph.outputs:
                total += value_cost(graph.values[v], layout, ways, fixed.rest.get(v), model)

    # inputs and parameters
    named = {v for name, v in graph.params if name not in graph.buffers}
    for v in (*graph.inputs, *(v for _, v in graph.params)):
        ports = tuple(taken.get(v, ()))
        if v in named:
            total += stored_cost(graph.values[v], ports, fixed.rest.get(v), model)
        elif v in fixed.rest:
            total += value_cost(graph.values[v], fixed.rest[v], ports, None, model)
    return total


def value_cost(
    value: Value,
    layout: TensorLayout,
    ways: Sequence[TensorLayout],
    written: TensorLayout | None,
    model: CostModel,
) -> StepCost:
    """Returns the cost of all moves of a value made in ``layout`` and taken in ``ways``, in this order.

    A partial sum is reduced immediately, into the layout ``written`` or else the layout of its first user.
    """
    rest = written or layout
    if rest.partial:
        rest = (ways[0] if ways else rest).summed().canonical
    moves = [move_cost(rest, way, value, model) for way in dict.fromkeys(ways)]
    return summed(moves, move_cost(layout, rest, value, model))


def stored_cost(
    value: Value, ports: tuple[TensorLayout, ...], written: TensorLayout | None, model: CostModel
) -> StepCost:
    """Returns the cost of a parameter that is taken as ``ports``.

    If all of these are equal, its gradient is summed once per step.
    """
    if not ports:
        return StepCost()
    stored = written or ports[0].summed().canonical
    if set(ports) == {ports[0]} and ports[0].summed().canonical == stored:
        return parameter_cost(ports[0], value, model)
    moves = [move_cost(stored, way, value, model) for way in dict.fromkeys(ports)]
    return summed(moves, parameter_cost(stored, value, model))


def _ports(
    graph: OpGraph, rules: Sequence[OpRule | None], strategies: Sequence[OpStrategy]
) -> dict[int, list[TensorLayout]]:
    ports: dict[int, list[TensorLayout]] = {}
    for node, rule, strategy in zip(graph.nodes, rules, strategies, strict=True):
        for place, v in enumerate(node.ins):
            ports.setdefault(v, []).append(port(rule, strategy, place, len(graph.values[v].shape)))
    return ports


def summed(costs: Iterable[StepCost], first: StepCost) -> StepCost:
    return sum(costs, start=first)


def on_cluster(costs: CostModel, job: Job, ranks: int) -> CostModel:
    """Returns ``costs`` with the speeds of ``job.cluster``, if known, for stages of ``ranks`` ranks."""
    fast = speeds(job)
    if fast is None:
        return costs
    latency, rate = fast.ring(range(ranks))
    return replace(
        costs,
        flops_per_second=fast.peak * fast.efficiency,
        memory_bytes_per_second=fast.memory,
        latency=latency,
        bytes_per_second=rate,
    )
