"""What a step has to do, whatever it runs on: kernels, messages, and what weights and gradients send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from launcher.plan.cost.cut_model import CutModel
from launcher.plan.cost.fusion import Fused
from launcher.plan.cost.memory import Memory
from launcher.plan.cost.traffic import between_copies, between_replicas
from launcher.plan.operators.resolve import Spread
from launcher.plan.partition.stages import Stage, around
from launcher.plan.schedule.actions import Schedule
from launcher.plan.values.facts import Graph, Node
from launcher.plan.values.grid import Grid
from launcher.plan.values.operations import Operations, total

LOSS = Operations(moved=28, kernels=12)
"""Bytes a logit: to float32, log-softmax and its backward; kernels of all of it."""
JOINED_PASSES = 4
"""Of a compiled loss: twice through the logits, and in the backward through them and their gradients."""
SHARES = ("all_gather", "reduce_scatter")
"""Kinds that go over the ranks that share weights; the rest goes over all that have the same."""

Sent = tuple[str, int, int]
"""Collectives of one kind: the bytes of each, and how many there are."""


@dataclass(frozen=True)
class Pass:
    """One action: its kernels, and what it sends over ``tp``."""

    kernels: Operations
    sent: tuple[Sent, ...] = ()


@dataclass(frozen=True)
class StageWork:
    """Of one micro batch on a stage, or of one piece of it.

    ``late``: what of the backward a split one puts off, which sends nothing; ``saved`` and ``waits``: bytes
    kept for the backward, and for that part of it.
    """

    forward: Pass
    backward: Pass
    late: Operations
    saved: int
    waits: int


@dataclass(frozen=True)
class RankWork:
    """Of a pipeline rank, once a step: what it sends to those that ``share`` its weights, to those with the
    ``same`` and with copies of ``tied`` ones.

    ``state``: bytes that the optimizer reads and writes; ``memory``: those that it holds at most.
    """

    share: tuple[Sent, ...]
    same: tuple[Sent, ...]
    tied: tuple[Sent, ...]
    state: int
    memory: int


@dataclass(frozen=True)
class StepWork:
    """``stages``: one after the other, of each its ``pieces``. ``crossings``: bytes between stages.

    ``replicated``: weights are shared by some ranks and copied to others. ``flops``: of the model, on all
    ranks.
    """

    grid: Grid
    places: tuple[int, ...]
    schedule: Schedule
    micros: int
    pieces: int
    stages: tuple[StageWork, ...]
    crossings: tuple[int, ...]
    ranks: tuple[RankWork, ...]
    replicated: bool
    flops: int
    samples: int
    tokens: int | None

    @property
    def memory(self) -> int:
        """Bytes on the rank that has most."""
        return max(r.memory for r in self.ranks)


def step_work(at: CutModel, fused: Fused, memory: Sequence[Memory], flops: int) -> StepWork:
    """Of the plan that ``at`` and ``fused`` are parts of."""
    sizes = at.sizes
    return StepWork(
        grid=sizes.grid,
        places=sizes.places,
        schedule=at.schedule,
        micros=sizes.micros,
        pieces=sizes.pieces,
        stages=tuple(_stage(at, s, g, fused.spreads) for s in at.stages for g in at.graphs),
        crossings=tuple(sum(t.nbytes for c in b for t in c.specs) for b in at.boundaries[:-1]),
        ranks=tuple(_rank(at, fused, pp, memory) for pp in range(sizes.grid["pp"])),
        replicated=at.hsdp is not None and sizes.grid["dp_replicate"] > 1,
        flops=flops,
        samples=sizes.global_batch,
        tokens=_tokens(at.graphs, sizes.global_batch),
    )


def _tokens(graphs: Sequence[Graph], samples: int) -> int | None:
    """Positions of sequences, where inputs are such; ``None`` where they are not."""
    specs = [n.out[0] for g in graphs for n in g.nodes if n.kind == "input" and n.out]
    if not all(s.dtype.startswith("int") and len(s.shape) == 2 for s in specs):
        return None
    inputs = sum(n.kind == "input" for n in graphs[0].nodes)
    return samples * sum(s.shape[1] for s in specs) // inputs if specs else None


def _stage(at: CutModel, stage: Stage, graph: Graph, spreads: Sequence[Spread]) -> StageWork:
    last = stage.index == len(at.stages) - 1
    modules = frozenset(stage.modules if len(at.stages) > 1 else [""])
    here = [s for s in spreads if not modules.isdisjoint(around(s.operator.module))]
    nodes = [graph[n] for n in stage.nodes]
    return work_of(nodes, here, pieces=len(at.graphs), loss=loss(graph, at.loss_compiled) if last else None)


def work_of(
    nodes: Sequence[Node], spreads: Sequence[Spread], *, pieces: int, loss: Operations | None
) -> StageWork:
    """Of these ``nodes``, among them all operators that ``spreads`` has; ``loss``: what comes after them."""
    backward = total([*(n.backward.operations for n in nodes), *([loss] if loss else [])])

    # what its operators send, and what running again sends once more
    sent = [(c.phase, c.op, c.nbytes // pieces) for s in spreads for c in s.comms]
    sent += [("backward", op, nbytes) for n in nodes for op, nbytes in n.backward.sent]
    return StageWork(
        Pass(total(n.operations for n in nodes), _counted(s[1:] for s in sent if s[0] == "forward")),
        Pass(backward, _counted(s[1:] for s in sent if s[0] == "backward")),
        late=total(n.backward.deferred for n in nodes),
        saved=sum(n.saved for n in nodes),
        waits=sum(n.backward.kept for n in nodes),
    )


def loss(graph: Graph, compiled: bool = False) -> Operations:
    """Of the logits that the model returns; ``compiled``: in kernels that take them as they are."""
    specs = (graph.nodes[-1].out or ())[:1]
    if compiled:
        return Operations(moved=sum(JOINED_PASSES * t.nbytes for t in specs), kernels=JOINED_PASSES)
    logits = sum(prod(t.shape) for t in specs)
    return Operations(moved=LOSS.moved * logits, kernels=LOSS.kernels)


def _rank(at: CutModel, fused: Fused, pp: int, memory: Sequence[Memory]) -> RankWork:
    grid = at.sizes.grid
    first = grid.ranks(pp=pp)[0]
    events = list(between_replicas(at, fused, at.named, pp))
    there = set(grid.ranks(pp=pp))
    here = [m for m in memory if m.rank in there]
    return RankWork(
        share=_counted(e for e in events if e[0] in SHARES),
        same=_counted(e for e in events if e[0] not in SHARES),
        tied=_counted(between_copies(at.ties, at.named, at.sizes, first)),
        state=max(3 * m.params + 2 * m.optimizer for m in here),
        memory=max(m.total for m in here),
    )


def _counted(events: Iterable[tuple[str, int]]) -> tuple[Sent, ...]:
    return tuple((kind, nbytes, n) for (kind, nbytes), n in Counter(events).items())
