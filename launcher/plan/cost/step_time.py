"""The time of each stage's actions and the bytes that they keep, for the simulation of schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.plan.partition.stages import Stage
from launcher.plan.schedule.simulate import Cost
from launcher.plan.values.facts import Graph, Node

FLOPS_A_BYTE = 16
"""The flops that take as long as writing one byte: about the ratio of CPUs and GPUs in fp32."""


def step_time(stages: tuple[Stage, ...], graphs: tuple[Graph, ...]) -> Cost:
    """Returns the cost of each stage, with flops as the unit of time; transfers take none.

    A forward counts its flops and the bytes that its nodes write. A backward takes twice as long, plus the
    flops of forwards that it runs again. ``graphs``: one, or one a piece.
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

    ``sent``: the collectives over tp that it repeats, each a kind and its bytes.
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
