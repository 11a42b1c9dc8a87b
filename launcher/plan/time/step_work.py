"""What a step has to do: FLOPs, bytes, kernels, messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from launcher.plan.communication.buckets_and_gathers import Communication
from launcher.plan.cut.stages import Stage, around, covers
from launcher.plan.cut_model import CutModel
from launcher.plan.memory.rank_memory import Memory
from launcher.plan.schedule.schedules import Schedule
from launcher.plan.sizes import Sizes
from launcher.plan.tensor_parallel.sharded_operators import ShardedOperator
from launcher.plan.time.traffic import between_copies, between_replicas
from launcher.plan.values.compilation import STAGE, Compilation
from launcher.plan.values.grid import Grid
from launcher.plan.values.model_graph import Compiled, Graph, Node, Segment
from launcher.plan.values.operations import Operations, total

LOSS = Operations(moved=28, kernels=12)
"""The bytes per logit, and the kernels, of a conversion to float32, a log-softmax and its backward."""
JOINED_PASSES = 4
"""Passes over the logits in a compiled loss.

The forward reads them twice; the backward passes over them and over their gradients.
"""
SHARES = ("all_gather", "reduce_scatter")
"""Collectives among ranks that shard the same weights; the others run among all ranks with equal weights."""

Sent = tuple[str, int, int]
"""Collectives of one kind and size: the kind, the bytes of each, and their number."""


@dataclass(frozen=True)
class ActionWork:
    """The work of one action: its kernels, and what it sends over ``tp``."""

    kernels: Operations
    sent: tuple[Sent, ...] = ()


@dataclass(frozen=True)
class StageWork:
    """The work of one micro batch, or a piece of one, on a stage.

    ``late``: the part of the backward that a split backward defers; it sends nothing. ``saved``: bytes kept
    for the backward; ``waits``: bytes kept for the deferred part.
    """

    forward: ActionWork
    backward: ActionWork
    late: Operations
    saved: int
    waits: int


@dataclass(frozen=True)
class RankWork:
    """The work of a pipeline rank once a step.

    ``share``: what it sends to ranks that have other shards of its weights; ``same``: to ranks that have the
    same weights; ``tied``: to ranks that have copies of tied weights. ``state``: bytes that the optimizer
    reads and writes; ``memory``: the bytes of the rank at its fullest moment.
    """

    share: tuple[Sent, ...]
    same: tuple[Sent, ...]
    tied: tuple[Sent, ...]
    state: int
    memory: int


@dataclass(frozen=True)
class StepWork:
    """The work of a step.

    ``stages`` has one entry for each stage and piece, stage by stage. ``crossings``: bytes that each stage
    sends to the next for a micro batch. ``replicated``: weights are sharded over some ranks and replicated
    over others. ``flops``: model FLOPs on all ranks.
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
        """The bytes on the fullest rank."""
        return max(r.memory for r in self.ranks)


def step_work(at: CutModel, fused: Communication, memory: Sequence[Memory], flops: int) -> StepWork:
    """Returns the work of a plan's step.

    ``at`` and ``fused`` are parts of the plan; ``memory`` has one row per rank; ``flops`` are the step's.
    """
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
    """Returns the tokens of a step, or ``None`` if the inputs are not sequences of ids."""
    specs = [n.out[0] for g in graphs for n in g.nodes if n.kind == "input" and n.out]
    if not all(s.dtype.startswith("int") and len(s.shape) == 2 for s in specs):
        return None
    inputs = sum(n.kind == "input" for n in graphs[0].nodes)
    return samples * sum(s.shape[1] for s in specs) // inputs if specs else None


def _stage(at: CutModel, stage: Stage, graph: Graph, spreads: Sequence[ShardedOperator]) -> StageWork:
    last = stage.index == len(at.stages) - 1
    modules = frozenset(stage.modules if len(at.stages) > 1 else [""])
    here = [s for s in spreads if not modules.isdisjoint(around(s.operator.module))]
    nodes = [graph[n] for n in stage.nodes]
    return work_of(nodes, here, pieces=len(at.graphs), loss=loss(graph, at.loss_compiled) if last else None)


def work_of(
    nodes: Sequence[Node], spreads: Sequence[ShardedOperator], *, pieces: int, loss: Operations | None
) -> StageWork:
    """Returns the work of ``nodes``, followed by that of ``loss``.

    ``spreads``: the operators among them that are cut over ``tp``; ``pieces``: the number of pieces into
    which their messages are divided.
    """
    backward = total([*(n.backward.operations for n in nodes), *([loss] if loss else [])])

    # what the operators send, and what recomputation sends again
    sent = [(c.phase, c.op, c.nbytes // pieces) for s in spreads for c in s.comms]
    sent += [("backward", op, nbytes) for n in nodes for op, nbytes in n.backward.sent]
    return StageWork(
        ActionWork(total(n.operations for n in nodes), _counted(s[1:] for s in sent if s[0] == "forward")),
        ActionWork(backward, _counted(s[1:] for s in sent if s[0] == "backward")),
        late=total(n.backward.deferred for n in nodes),
        saved=sum(n.saved for n in nodes),
        waits=sum(n.backward.kept for n in nodes),
    )


def loss(graph: Graph, compiled: bool = False) -> Operations:
    """Returns the work of the loss; ``compiled``: its kernels read the logits in their own dtype."""
    specs = (graph.nodes[-1].out or ())[:1]
    if compiled:
        return Operations(moved=sum(JOINED_PASSES * t.nbytes for t in specs), kernels=JOINED_PASSES)
    logits = sum(prod(t.shape) for t in specs)
    return Operations(moved=LOSS.moved * logits, kernels=LOSS.kernels)


def _rank(at: CutModel, fused: Communication, pp: int, memory: Sequence[Memory]) -> RankWork:
    grid = at.sizes.grid
    first = grid.ranks(pp=pp)[0]
    events = list(between_replicas(at, fused, at.named, pp))
    stage_ranks = set(grid.ranks(pp=pp))
    here = [m for m in memory if m.rank in stage_ranks]
    return RankWork(
        share=_counted(e for e in events if e[0] in SHARES),
        same=_counted(e for e in events if e[0] not in SHARES),
        tied=_counted(between_copies(at.ties, at.named, at.sizes, first)),
        state=max(3 * m.params + 2 * m.optimizer for m in here),
        memory=max(m.total for m in here),
    )


def _counted(events: Iterable[tuple[str, int]]) -> tuple[Sent, ...]:
    return tuple((kind, nbytes, n) for (kind, nbytes), n in Counter(events).items())


BACKWARD = 2
"""The cost of a backward in forwards: a product has two gradients, of its input and of its weight."""


def step_flops(graphs: tuple[Graph, ...], sizes: Sizes) -> int:
    """Returns the flops of matrix products, attention and convolutions in one optimizer step of all ranks.

    This follows the usual definition of model FLOPs: forwards that the backward runs again do not count
    (``parallel.recompute``), frozen weights count as if they had gradients, and attention counts in full,
    causal or not. ``graphs``: of one micro batch on one rank of tp, or of its pieces.
    """
    forward = sum(node.flops for graph in graphs for node in graph.nodes)
    return (1 + BACKWARD) * forward * sizes.micros * sizes.replicas * sizes.grid["tp"]


def with_compilation(model: CutModel, plan: Compilation | None) -> CutModel:
    """Returns ``model`` with its compilation; if kernels are fused, compiled modules get their new costs.

    A node or segment that merely contains compiled modules keeps its eager costs.
    """
    graphs = model.graphs
    if plan is not None and plan.fuses:
        graphs = tuple(_compiled(g, plan.modules) for g in graphs)
    return replace(model, graphs=graphs, compilation=plan)


def _compiled(graph: Graph, modules: tuple[str, ...]) -> Graph:
    nodes = [_node(n, n.backward.compiled) if _inside(n.target, modules, n) else n for n in graph.nodes]
    if not graph.segments:
        return replace(graph, nodes=tuple(nodes))

    # an untraced model is one node; its segments say what is compiled
    less = [s.backward.compiled for s in graph.segments if s.module and _covered(s.module, modules)]
    spared = Compiled(
        total(c.forward for c in less), total(c.backward for c in less), sum(c.saved for c in less)
    )
    nodes = [_node(n, spared) if n.kind == "module" else n for n in graph.nodes]
    segments = [_segment(s) if s.module and _covered(s.module, modules) else s for s in graph.segments]
    return replace(graph, nodes=tuple(nodes), segments=tuple(segments))


def _inside(target: str, modules: tuple[str, ...], node: Node) -> bool:
    return node.kind == "module" and _covered(target, modules)


def _covered(module: str, modules: tuple[str, ...]) -> bool:
    return modules == (STAGE,) or any(covers(m, module) for m in modules)


def _node(node: Node, spared: Compiled) -> Node:
    backward = replace(node.backward, operations=node.backward.operations - spared.backward)
    return replace(
        node,
        saved=max(0, node.saved - spared.saved),
        operations=node.operations - spared.forward,
        backward=backward,
    )


def _segment(segment: Segment) -> Segment:
    spared = segment.backward.compiled
    backward = replace(segment.backward, operations=segment.backward.operations - spared.backward)
    return replace(segment, saved=max(0, segment.saved - spared.saved), backward=backward)
