"""A graph whose operators have strategies: the layout of each value, and what each operator takes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from launcher.plan.sharding.op_graph import OpGraph
from launcher.plan.sharding.op_rule import OpRule, OpStrategy
from launcher.plan.sharding.tensor_layout import TensorLayout


@dataclass(frozen=True)
class Taken:
    """A value in the ``layout`` in which operators take it.

    ``terms``: axes of it over which the gradient comes back as terms of a sum.
    """

    value: int
    layout: TensorLayout
    terms: tuple[int, ...] = ()

    @property
    def gradient(self) -> TensorLayout:
        """The layout of the gradient that comes back."""
        return TensorLayout(self.layout.matrix, self.layout.dims, self.terms)


@dataclass(frozen=True)
class ShardedGraph:
    """``rules`` and ``strategies``, one a node; a node without a rule works on whole tensors.

    ``made``: the layout of each value as an operator makes it; ``layouts`` as it rests, to which it is
    brought at once, without terms of sums. ``taken``: every way in which a value is taken, once; ``takes``:
    of each node the places there of what it takes, ``returns`` those of the outputs, ``changes`` those of the
    buffers that a forward changes, which are whole on every rank.
    """

    graph: OpGraph
    rules: tuple[OpRule | None, ...]
    strategies: tuple[OpStrategy, ...]
    made: tuple[TensorLayout, ...]
    layouts: tuple[TensorLayout, ...]
    taken: tuple[Taken, ...]
    takes: tuple[tuple[int, ...], ...]
    returns: tuple[int, ...]
    changes: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return self.layouts[0].ranks

    def still(self, taken: Taken) -> bool:
        """Whether it is taken as it rests, its gradient being whole, too."""
        return self.arrives(taken) and not taken.terms

    def arrives(self, taken: Taken) -> bool:
        """Whether it is taken as it rests."""
        return taken.layout.canonical == self.layouts[taken.value].canonical

    @cached_property
    def params(self) -> frozenset[int]:
        """The values that are parameters or buffers."""
        return frozenset(v for _, v in self.graph.params)

    @cached_property
    def users(self) -> tuple[tuple[Taken, ...], ...]:
        """In which ways each value is taken."""
        out: list[list[Taken]] = [[] for _ in self.graph.values]
        for t in self.taken:
            out[t.value].append(t)
        return tuple(map(tuple, out))

    def summed_later(self, value: int) -> tuple[int, ...]:
        """Axes over which a parameter's gradient is summed once a step: where there is one way to take it."""
        users = self.users[value]
        return users[0].terms if len(users) == 1 and self.arrives(users[0]) else ()


def sharded(
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    strategies: Sequence[OpStrategy],
    *,
    given: Mapping[int, TensorLayout],
    outputs: Sequence[TensorLayout | None],
    rests: Mapping[int, TensorLayout] | None = None,
) -> ShardedGraph:
    """``given``: layouts of inputs, and of parameters that have one already; ``outputs``: what is to leave.

    An output that is ``None`` leaves as it rests. ``rests``: layouts that were asked for. A value that is
    made in terms of a sum rests in the layout in which it is taken first.
    """
    whole = _buffers(graph, strategies[0].ranks if strategies else 1)
    made: dict[int, TensorLayout] = {**given, **whole}
    rest = {**made, **(rests or {})}
    taken = _Takes(graph)

    # in the order in which they run; a parameter is laid out as its first user takes it
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

    # what leaves
    returns = []
    for value, wanted in zip(graph.outputs, outputs, strict=True):
        rest.setdefault(value, wanted if made[value].partial and wanted else made[value].summed())
        returns.append(taken.place(value, wanted or rest[value], ()))

    changes = []
    for name, value in graph.changes:
        kept = whole[dict(graph.params)[name]]
        rest.setdefault(value, kept if made[value].partial else made[value])
        changes.append(taken.place(value, kept, ()))

    unused = {v: m.summed() for v, m in made.items()}
    nothing = TensorLayout.whole(0, 1)
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
    """Every rank has all of them."""
    named = ((v, len(graph.values[v].shape)) for name, v in graph.params if name in graph.buffers)
    return {v: TensorLayout.whole(dims, ranks) for v, dims in named}


class _Takes:
    """The ways in which values are taken, each once."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.ways: list[Taken] = []
        self._places: dict[tuple[int, TensorLayout], int] = {}

    def place(self, value: int, layout: TensorLayout, terms: tuple[int, ...]) -> int:
        way = Taken(value, layout, terms if self.graph.values[value].trains else ())
        key = (value, way.gradient.canonical)
        if key not in self._places:
            self._places[key] = len(self.ways)
            self.ways.append(way)
        return self._places[key]


def _takes(
    graph: OpGraph, rule: OpRule | None, strategy: OpStrategy, place: int, value: int
) -> tuple[TensorLayout, tuple[int, ...]]:
    if rule is None:
        return TensorLayout.whole(len(graph.values[value].shape), strategy.ranks), ()
    return strategy.takes(rule, place), strategy.gradient_terms(rule, place)


def _makes(graph: OpGraph, rule: OpRule | None, strategy: OpStrategy, place: int, value: int) -> TensorLayout:
    if rule is None:
        return TensorLayout.whole(len(graph.values[value].shape), strategy.ranks)
    return strategy.makes(rule, place)
