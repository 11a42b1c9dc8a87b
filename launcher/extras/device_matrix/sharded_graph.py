"""A graph of operators with the layout of every value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from launcher.extras.device_matrix.hsdp import ShardedParam
from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.redistribution import Redistribution, back, redistribution
from launcher.plan.values.dtypes import WIDTH


@dataclass(frozen=True)
class InputLayout:
    """A value in the ``layout`` in which operators take it.

    ``terms``: axes of the layout over which the gradient consists of terms of a sum.
    """

    value: int
    layout: TensorLayout
    terms: tuple[int, ...] = ()

    @property
    def gradient(self) -> TensorLayout:
        """The layout in which the gradient arrives."""
        return TensorLayout(self.layout.matrix, self.layout.dims, self.terms)


@dataclass(frozen=True)
class ShardedGraph:
    """A graph with the strategies of its operators and the layouts of its values.

    ``rules`` and ``strategies`` have one entry per node; a node without a rule works on full tensors.
    ``made``: the layout in which each value is made. ``layouts``: the layout in which each value rests,
    without terms of sums; a value is redistributed to it directly after it is made. ``taken``: each distinct
    way in which a value is taken. ``takes``, ``returns`` and ``changes`` are places in ``taken``: of the
    inputs of each node, of the outputs of the graph, and of the buffers that a forward changes, which are
    replicated on every rank.
    """

    graph: OpGraph
    rules: tuple[OpRule | None, ...]
    strategies: tuple[OpStrategy, ...]
    made: tuple[TensorLayout, ...]
    layouts: tuple[TensorLayout, ...]
    taken: tuple[InputLayout, ...]
    takes: tuple[tuple[int, ...], ...]
    returns: tuple[int, ...]
    changes: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return self.layouts[0].ranks

    def still(self, taken: InputLayout) -> bool:
        """Returns true if a value is taken in its layout at rest, and its gradient needs no sum."""
        return self.arrives(taken) and not taken.terms

    def arrives(self, taken: InputLayout) -> bool:
        """Returns true if a value is taken in its layout at rest."""
        return taken.layout.canonical == self.layouts[taken.value].canonical

    @cached_property
    def params(self) -> frozenset[int]:
        """The values that are parameters or buffers."""
        return frozenset(v for _, v in self.graph.params)

    @cached_property
    def users(self) -> tuple[tuple[InputLayout, ...], ...]:
        """The layouts in which operators take each value, by value."""
        out: list[list[InputLayout]] = [[] for _ in self.graph.values]
        for t in self.taken:
            out[t.value].append(t)
        return tuple(map(tuple, out))

    def summed_later(self, value: int) -> tuple[int, ...]:
        """Returns the axes over which the gradient of a parameter is summed once per step.

        Empty unless all operators take the parameter in its layout at rest.
        """
        users = self.users[value]
        return users[0].terms if len(users) == 1 and self.arrives(users[0]) else ()


def sharded(
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    strategies: Sequence[OpStrategy],
    *,
    known_layouts: Mapping[int, TensorLayout],
    outputs: Sequence[TensorLayout | None],
    rests: Mapping[int, TensorLayout] | None = None,
) -> ShardedGraph:
    """Returns ``graph`` with the layouts of all values.

    A value that is made as terms of a sum rests in the layout in which it is taken first.

    Args:
        graph: the operators of a stage.
        rules: the rule of each node, if it has one.
        strategies: the strategy of each node.
        known_layouts: layouts of inputs, and of parameters that already have one.
        outputs: layouts of the outputs; ``None`` for an output that keeps its layout at rest.
        rests: requested layouts at rest.
    """
    buffers = _buffers(graph, strategies[0].ranks if strategies else 1)
    made: dict[int, TensorLayout] = {**known_layouts, **buffers}
    rest = {**made, **(rests or {})}
    taken = _Takes(graph)

    # operators in the order in which they run; a parameter has the layout in which its first user takes it
    takes = []
    for node, rule, strategy in zip(graph.nodes, rules, strategies, strict=True):
        mine = []
        for place, value in enumerate(node.ins):
            layout, terms = _takes(graph, rule, strategy, place, value)
            made.setdefault(value, layout)
            rest.setdefault(value, layout if made[value].partial else made[value])
            mine.append(taken.place(value, layout, terms))
        takes.append(tuple(mine))
        for place, value in enumerate(node.outs):
            made[value] = _makes(graph, rule, strategy, place, value)

    # outputs
    returns = []
    for value, requested in zip(graph.outputs, outputs, strict=True):
        rest.setdefault(value, requested if made[value].partial and requested else made[value].summed())
        returns.append(taken.place(value, requested or rest[value], ()))

    changes = []
    for name, value in graph.changes:
        kept = buffers[dict(graph.params)[name]]
        rest.setdefault(value, kept if made[value].partial else made[value])
        changes.append(taken.place(value, kept, ()))

    unused = {v: m.summed() for v, m in made.items()}
    nothing = TensorLayout.replicated(0, 1)
    values = range(len(graph.values))
    return ShardedGraph(
        graph=graph,
        rules=tuple(rules),
        strategies=tuple(strategies),
        made=tuple(made.get(v, nothing) for v in values),
        layouts=tuple(rest.get(v, unused.get(v, nothing)) for v in values),
        taken=tuple(taken.ways),
        takes=tuple(takes),
        returns=tuple(returns),
        changes=tuple(changes),
    )


def _buffers(graph: OpGraph, ranks: int) -> dict[int, TensorLayout]:
    """Returns the layouts of buffers: every rank has all of them."""
    named = ((v, len(graph.values[v].shape)) for name, v in graph.params if name in graph.buffers)
    return {v: TensorLayout.replicated(dims, ranks) for v, dims in named}


class _Takes:
    """Collects the distinct ways in which values are taken."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.ways: list[InputLayout] = []
        self._places: dict[tuple[int, TensorLayout], int] = {}

    def place(self, value: int, layout: TensorLayout, terms: tuple[int, ...]) -> int:
        way = InputLayout(value, layout, terms if self.graph.values[value].trains else ())
        key = (value, way.gradient.canonical)
        if key not in self._places:
            self._places[key] = len(self.ways)
            self.ways.append(way)
        return self._places[key]


def _takes(
    graph: OpGraph, rule: OpRule | None, strategy: OpStrategy, place: int, value: int
) -> tuple[TensorLayout, tuple[int, ...]]:
    if rule is None:
        return TensorLayout.replicated(len(graph.values[value].shape), strategy.ranks), ()
    return strategy.takes(rule, place), strategy.gradient_terms(rule, place)


def _makes(graph: OpGraph, rule: OpRule | None, strategy: OpStrategy, place: int, value: int) -> TensorLayout:
    if rule is None:
        return TensorLayout.replicated(len(graph.values[value].shape), strategy.ranks)
    return strategy.makes(rule, place)


@dataclass(frozen=True)
class RedistributionPair:
    """A redistribution, and that of its gradient, if there is one. ``itemsize``: bytes per element."""

    forward: Redistribution
    backward: Redistribution | None
    itemsize: int


def taken(graph: ShardedGraph, way: InputLayout) -> RedistributionPair | None:
    """Returns the move of a value from its layout at rest to the layout in which an operator takes it.

    ``None`` if both layouts are the same, or for a parameter whose gradient is summed once per step.
    """
    if graph.still(way) or (way.value in graph.params and graph.summed_later(way.value)):
        return None
    return _move(graph, way.value, graph.layouts[way.value], way.layout, terms=way.terms)


def move_to_rest(graph: ShardedGraph, value: int) -> RedistributionPair | None:
    """Returns the move of a value from the layout in which an operator makes it to its layout at rest.

    Returns ``None`` if there is nothing to move.
    """
    if graph.made[value].canonical == graph.layouts[value].canonical:
        return None
    return _move(graph, value, graph.made[value], graph.layouts[value], terms=())


def _move(
    graph: ShardedGraph, value: int, src: TensorLayout, dst: TensorLayout, terms: tuple[int, ...]
) -> RedistributionPair:
    of = graph.graph.values[value]
    size = WIDTH[of.spec.dtype]
    backward = back(src, dst, terms, of.shape, size) if of.trains else None
    return RedistributionPair(redistribution(src, dst, of.shape, size), backward, size)


def moves(graph: ShardedGraph) -> Iterator[RedistributionPair]:
    """Yields all moves of one forward and its backward, in no particular order."""
    for way in graph.taken:
        move = taken(graph, way)
        if move is not None:
            yield move
    for node in graph.graph.nodes:
        for value in node.outs:
            move = move_to_rest(graph, value)
            if move is not None and graph.users[value]:
                yield move


def gathered(p: ShardedParam) -> Redistribution:
    """Returns the redistribution that gathers a sharded parameter for the operators that use it."""
    return redistribution(p.rest, p.used, p.spec.shape, WIDTH[p.spec.dtype])


def reduced(p: ShardedParam) -> Redistribution:
    """Returns the redistribution that sums the terms of a parameter's gradient into its layout at rest."""
    return back(p.rest, p.used, p.terms, p.spec.shape, WIDTH[p.spec.dtype])


SHAPED_LIKE = ("expand_as", "reshape_as", "type_as", "view_as")
"""Kinds whose first tensor alone gets a gradient; of the others only the shape or dtype is used."""


@dataclass(frozen=True)
class GradientFlow:
    """The path of gradients through a sharded graph.

    ``ways``: places in ``ShardedGraph.taken`` that return a gradient. ``values``: values that get one.
    ``nodes``: operators whose backward runs.
    """

    ways: frozenset[int]
    values: frozenset[int]
    nodes: frozenset[int]


def gradient_flow(graph: ShardedGraph) -> GradientFlow:
    """Returns the flow of the gradients of all outputs.

    Not every value that requires a gradient gets one, because the outputs may not depend on it.
    """
    trains = [v.trains for v in graph.graph.values]
    ways = {way for way in graph.returns if trains[graph.taken[way].value]}
    values = {graph.taken[way].value for way in ways}
    nodes = set()
    for at in reversed(range(len(graph.graph.nodes))):
        node = graph.graph.nodes[at]
        if not any(trains[v] and v in values for v in node.outs):
            continue
        nodes.add(at)
        count = 1 if node.kind in SHAPED_LIKE else len(node.ins)
        reached = {way for way in graph.takes[at][:count] if trains[graph.taken[way].value]}
        ways |= reached
        values |= {graph.taken[way].value for way in reached}
    return GradientFlow(frozenset(ways), frozenset(values), frozenset(nodes))
