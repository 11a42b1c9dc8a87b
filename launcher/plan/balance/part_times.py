"""Seconds of stages that are not cut yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from launcher.plan.cut.stages import Stage, around
from launcher.plan.schedule.simulate import Cost
from launcher.plan.tensor_parallel.sharded_operators import ShardedOperator
from launcher.plan.time.prediction import PartSeconds, load
from launcher.plan.time.speeds import Speeds
from launcher.plan.time.step_work import ActionWork, loss, work_of
from launcher.plan.values.grid import Grid
from launcher.plan.values.model_graph import Graph, Node

FLOPS_A_BYTE = 16
"""The flops that take as long as writing one byte: about the ratio of CPUs and GPUs in fp32."""


def step_time(stages: tuple[Stage, ...], graphs: tuple[Graph, ...]) -> Cost:
    """Returns the cost of each stage, with flops as the unit of time; transfers take none.

    A forward counts its flops and the bytes that its nodes write. A backward takes twice as long, plus the
    flops of forwards that it runs again. ``graphs``: one, or one per piece.
    """
    passes = [(stage, graph) for stage in stages for graph in graphs]
    forward = tuple(forward_time([graph[n] for n in stage.nodes]) for stage, graph in passes)
    backward = [[graph[n].backward for n in stage.nodes] for stage, graph in passes]
    again = [sum(b.again for b in nodes) for nodes in backward]

    return Cost(
        forward,
        backward=tuple(2 * time + more for time, more in zip(forward, again, strict=True)),
        activation=tuple(sum(graph[n].saved for n in stage.nodes) for stage, graph in passes),
        weight=tuple(float(sum(b.deferred.flops for b in nodes)) for nodes in backward),
        waits=tuple(sum(b.kept for b in nodes) for nodes in backward),
        pieces=len(graphs),
    )


@dataclass(frozen=True)
class Rerun:
    """The effect of recomputation on one micro batch of a stage: bytes ``spared``, ``flops`` added.

    ``sent``: the collectives over tp that it repeats, each as its kind and its bytes.
    """

    spared: int
    flops: int
    sent: tuple[tuple[str, int], ...] = ()


def rerun(stage: Stage, graphs: tuple[Graph, ...]) -> Rerun:
    """Returns the recomputation of one stage, over all pieces of a sequence."""
    backwards = [graph[n].backward for graph in graphs if not graph.segments for n in stage.nodes]
    backwards += [s.backward for graph in graphs for s in graph.segments]
    sent = tuple(s for b in backwards for s in b.sent)
    return Rerun(sum(b.spared for b in backwards), sum(b.again for b in backwards), sent)


def forward_time(nodes: Sequence[Node]) -> float:
    """Returns the time of a forward in flops, including that of the bytes that the nodes write."""
    written = sum(t.nbytes for n in nodes if n.kind in ("module", "glue") for t in n.out or ())
    return float(max(sum(n.flops for n in nodes) + FLOPS_A_BYTE * written, 1))


@dataclass(frozen=True)
class PartTime:
    """The time of one micro batch, or a piece of one, in a part.

    ``late``: the second half of the backward, if it is split.
    """

    forward: PartSeconds
    backward: PartSeconds
    late: PartSeconds

    @property
    def numbers(self) -> tuple[float, ...]:
        return (*astuple(self.forward), *astuple(self.backward), *astuple(self.late))


Link = tuple[float, float]


@dataclass(frozen=True)
class PartTimes:
    """The times of all parts.

    ``times`` is indexed by piece, then by part. ``slot``: the time that every action takes in addition.
    ``crossings``: bytes that leave each part for a later one. ``links``: the latency in seconds and the bytes
    a second of a message from each stage to the next; empty if messages take no time.
    """

    times: tuple[tuple[PartTime, ...], ...]
    slot: float
    crossings: tuple[int, ...]
    links: tuple[Link, ...] = ()

    @cached_property
    def _sums(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """For each piece and part, the sum of the times of all parts before it."""
        none = (0.0,) * 12
        return tuple(tuple(accumulate((t.numbers for t in row), _plus, initial=none)) for row in self.times)

    @property
    def each(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The forward and backward times of each part alone, as the mean over pieces."""
        n = len(self.times)
        alone = [
            [self._pass(piece, part, part + 1)[:2] for part in range(len(row))]
            for piece, row in enumerate(self.times)
        ]
        forward = tuple(sum(f for f, _ in part) / n for part in zip(*alone, strict=True))
        return forward, tuple(sum(b for _, b in part) / n for part in zip(*alone, strict=True))

    def cost(self, cut: Sequence[int]) -> Cost:
        """Returns the cost of a cut, for the simulation of schedules.

        ``cut`` has the first part of each stage, then the number of parts.
        """
        pieces = range(len(self.times))
        passes = [self._pass(piece, i, j) for i, j in pairwise(cut) for piece in pieces]
        return Cost(
            forward=tuple(forward for forward, _, _ in passes),
            backward=tuple(backward for _, backward, _ in passes),
            activation=(0,) * len(passes),
            transfer=max((self._message(s, i - 1) for s, i in enumerate(cut[1:-1])), default=0.0),
            weight=tuple(late for _, _, late in passes),
            pieces=len(self.times),
        )

    def _message(self, stage: int, part: int) -> float:
        """Returns the time of a message of one piece from ``stage``, whose last part is ``part``."""
        if not self.links:
            return 0.0
        latency, rate = self.links[stage]
        return latency + self.crossings[part] // len(self.times) / rate

    @cached_property
    def _passes(self) -> dict[tuple[int, int, int], tuple[float, float, float]]:
        """A cache of computed runs: cuts have many runs in common."""
        return {}

    def _pass(self, piece: int, start: int, end: int) -> tuple[float, float, float]:
        """Returns the times of forward, backward and deferred half of the backward of a run of parts."""
        run = piece, start, end
        if run not in self._passes:
            sums = self._sums[piece]
            n = [b - a for a, b in zip(sums[start], sums[end], strict=True)]
            backward = PartSeconds(*n[4:8]).action.seconds + self.slot
            forward = PartSeconds(*n[:4]).action.seconds + self.slot
            self._passes[run] = forward, backward, PartSeconds(*n[8:]).action.seconds
        return self._passes[run]


def _plus(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(sum, zip(a, b, strict=True)))


Parts = Sequence[Sequence[str]]
"""The nodes of each part."""


def unitless(graphs: Sequence[Graph], parts: Parts, crossings: tuple[int, ...]) -> PartTimes:
    """Returns times without unit, as ``step_time`` defines them."""
    times = tuple(tuple(_unitless([g[n] for n in part]) for part in parts) for g in graphs)
    return PartTimes(times, 0.0, crossings)


def _unitless(nodes: Sequence[Node]) -> PartTime:
    forward = forward_time(nodes)
    backward = 2 * forward + sum(n.backward.again for n in nodes)
    late = float(sum(n.backward.deferred.flops for n in nodes))
    return PartTime(*(PartSeconds(seconds, 0.0, 0.0) for seconds in (forward, backward, late)))


def predicted(
    graphs: Sequence[Graph],
    parts: Parts,
    crossings: tuple[int, ...],
    *,
    spreads: Sequence[ShardedOperator],
    grid: Grid,
    places: tuple[int, ...],
    speeds: Speeds,
) -> PartTimes:
    """Returns times in seconds, with the same prediction as the step of a plan.

    Args:
        graphs: one of a micro batch, or one per piece.
        parts: the nodes of each part.
        crossings: bytes that leave each part for a later one.
        spreads: the operators that are cut over ``tp``.
        grid: the ranks.
        places: the pipeline rank of each stage.
        speeds: the speeds of the cluster.
    """
    firsts = [grid.ranks(pp=pp)[0] for pp in places]
    links = tuple(speeds.link(*pair) for pair in pairwise(firsts))
    cut = defaultdict[str, list[ShardedOperator]](list)
    for spread in spreads:
        for module in around(spread.operator.module):
            cut[module].append(spread)

    rows = []
    for graph in graphs:
        row = []
        for at, part in enumerate(parts):
            nodes = [graph[n] for n in part]
            called = dict.fromkeys(n.target for n in nodes if n.kind == "module")
            here = [s for m in called for s in cut[m]]
            last = loss(graph) if at == len(parts) - 1 else None
            work = work_of(nodes, here, pieces=len(graphs), loss=last)
            row.append(
                PartTime(
                    load(work.forward, grid, speeds, backward=False),
                    load(work.backward, grid, speeds, backward=True),
                    late=load(ActionWork(work.late), grid, speeds, backward=True),
                )
            )
        rows.append(tuple(row))
    slot = speeds.cluster.overheads.slot_ms / 1e3
    return PartTimes(tuple(rows), slot, crossings, links)
