"""The collectives of one training step over device matrices: how many a rank calls, and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from launcher.extras.device_matrix.redistribution import Redistribution
from launcher.extras.device_matrix.resolve import Sharding, StageSharding
from launcher.extras.device_matrix.rules.reductions import HALVES, inner_sums
from launcher.extras.device_matrix.sharded_graph import (
    GradientFlow,
    ShardedGraph,
    gathered,
    gradient_flow,
    move_to_rest,
    reduced,
    taken,
)
from launcher.plan.cut.stages import BoundaryTensor
from launcher.plan.cut.tensor_placement import Placed, Tie
from launcher.plan.schedule.schedules import Schedule
from launcher.plan.sizes import Sizes
from launcher.plan.time.traffic import Event, Traffic, added_up, between_copies, between_stages, scalars
from launcher.plan.values.dtypes import WIDTH


@dataclass
class CollectiveCounter:
    """Counts the collectives of a stage.

    ``moves``: how often each redistribution runs, with the bytes per element. ``sums``: how often an
    all-reduce of a number of bytes runs.
    """

    moves: Counter[tuple[Redistribution, int]] = field(default_factory=Counter)
    sums: Counter[int] = field(default_factory=Counter)

    def add(self, plan: Redistribution, itemsize: int, times: int = 1) -> None:
        if plan.steps and times:
            self.moves[plan, itemsize] += times

    def events(self, rank: int) -> Iterator[Event]:
        """Yields the collectives of one rank of the stage."""
        yield from self._alike
        for (plan, itemsize), times in self._exchanges.items():
            for call in plan.traffic(rank):
                yield from [(call.op, call.elements * itemsize)] * times

    @cached_property
    def _alike(self) -> list[Event]:
        """The collectives that are equal on all ranks: all but exchanges, whose sizes differ among ranks."""
        events = [("all_reduce", n) for n in self.sums.elements()]
        for (plan, itemsize), times in self.moves.items():
            if (plan, itemsize) not in self._exchanges:
                for call in plan.traffic(0):
                    events += [(call.op, call.elements * itemsize)] * times
        return events

    @cached_property
    def _exchanges(self) -> dict[tuple[Redistribution, int], int]:
        return {
            key: times
            for key, times in self.moves.items()
            if any(step.op == "exchange" for step in key[0].steps)
        }


def sharded_traffic(
    sharding: Sharding,
    sizes: Sizes,
    schedule: Schedule,
    boundaries: tuple[tuple[BoundaryTensor, ...], ...],
    *,
    params: Iterable[Placed],
    ties: tuple[Tie, ...],
    regathered: Sequence[tuple[int, ...]],
) -> tuple[Traffic, ...]:
    """Returns the traffic of each rank, as ``launcher.plan.time.traffic``, including that inside modules.

    ``regathered``: ``StageBytes.regathered`` of each virtual stage.
    """
    placed = tuple(params)
    named = {n: p for p in placed for n in p.names}
    width = {p.name: WIDTH[p.spec.dtype] for p in placed}
    out: list[Traffic] = []
    for pp in range(sizes.grid["pp"]):
        calls = CollectiveCounter()
        for s in sizes.stages_of(pp):
            _stage(calls, sharding, s, sizes.micros, width)
            for p, times in zip(sharding.stages[s].params, regathered[s], strict=True):
                calls.add(gathered(p), WIDTH[p.spec.dtype], times * sizes.micros)
        same = [*scalars(sizes, pp), *between_stages(boundaries, schedule[pp], sizes.places, pp)]
        for place, rank in enumerate(sizes.grid.ranks(pp=pp)):
            tied = between_copies(ties, named, sizes, rank)
            out += added_up(rank, [*same, *tied, *calls.events(place)])
    return tuple(sorted(out, key=lambda t: t.rank))


def _stage(
    calls: CollectiveCounter, sharding: Sharding, index: int, micros: int, width: Mapping[str, int]
) -> None:
    """Adds the calls of one virtual stage; ``width``: bytes per element of each weight, as it is kept."""
    stage = sharding.stages[index]
    flow = gradient_flow(stage.train)
    _moves(calls, stage.train, flow, micros)
    _inside(calls, stage.train, flow, micros)
    _weights(calls, stage, flow, micros, sharding.level, width)
    if index == len(sharding.stages) - 1:
        _loss_traffic(calls, stage.train, micros)


def _moves(calls: CollectiveCounter, graph: ShardedGraph, flow: GradientFlow, micros: int) -> None:
    """Adds the redistributions between operators, in forward and backward."""
    values = graph.graph.values
    for at, way in enumerate(graph.taken):
        move = taken(graph, way)
        if move is not None:
            itemsize = WIDTH[values[way.value].spec.dtype]
            calls.add(move.forward, itemsize, micros)
            if move.backward is not None and at in flow.ways:
                calls.add(move.backward, itemsize, micros)
    for node in graph.graph.nodes:
        for value in node.outs:
            move = move_to_rest(graph, value)
            if move is not None and graph.users[value]:
                itemsize = WIDTH[values[value].spec.dtype]
                calls.add(move.forward, itemsize, micros)
                if move.backward is not None and value in flow.values:
                    calls.add(move.backward, itemsize, micros)


def _inside(calls: CollectiveCounter, graph: ShardedGraph, flow: GradientFlow, micros: int) -> None:
    """Adds the all-reduces inside of operators; those of backward only if the first input gets a gradient."""
    each = zip(graph.graph.nodes, graph.rules, graph.strategies, strict=True)
    for at, (node, rule, strategy) in enumerate(each):
        if rule is None or not rule.kernel:
            continue
        sums = inner_sums(node, graph.graph, rule, strategy)
        back = at in flow.nodes and graph.takes[at][0] in flow.ways
        for n in (*sums.forward, *(sums.backward if back else ())):
            calls.sums[n] += micros


def _weights(
    calls: CollectiveCounter,
    stage: StageSharding,
    flow: GradientFlow,
    micros: int,
    level: str | None,
    width: Mapping[str, int],
) -> None:
    """Adds the gathers of sharded weights, the reductions of their gradients, and sums of other gradients.

    Gathers are in the dtype of the computation: with level3 once per forward (``regathered`` counts those of
    backwards), otherwise once per step. level3 also reduces the gradients of shards in that dtype; all other
    gradients are reduced in the dtype that weights are kept in.
    """
    values = dict(stage.train.graph.params)
    for p in stage.params:
        trained, computed = values[p.name] in flow.values, WIDTH[p.spec.dtype]
        if p.shared:
            calls.add(gathered(p), computed, micros if level == "level3" else 1)
        if trained and (p.shared or p.terms):
            each = p.shared and level != "level1"
            wide = computed if p.shared and level == "level3" else width[p.name]
            calls.add(reduced(p), wide, micros if each else 1)


def _loss_traffic(calls: CollectiveCounter, graph: ShardedGraph, micros: int) -> None:
    """Adds the all-reduces of a loss over cut classes: for each position a maximum, then two sums at once."""
    way = graph.taken[graph.returns[0]]
    if not way.layout.dims or way.layout.slices[-1] == 1:
        return
    spec = graph.graph.values[way.value].spec
    positions = prod(way.layout.local_shape(spec.shape)[:-1])
    n = positions * WIDTH["float32" if spec.dtype in HALVES else spec.dtype]
    calls.sums[n] += micros
    calls.sums[2 * n] += micros
