"""Small graphs of matrix products, sums and activations, and every choice of strategies for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from random import Random

from launcher.extras.device_matrix.op_graph import OpGraph, OpNode, Ref, Value
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.rules.table import rule_of
from launcher.extras.device_matrix.search.candidates import dims_of_model
from launcher.extras.device_matrix.search.cost import CostModel, Layouts, graph_cost
from launcher.extras.device_matrix.search.variables import as_written, variables
from launcher.plan.values.tensor_spec import TensorSpec


class Maker:
    """Builds a graph node by node."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.params: list[tuple[str, int]] = []
        self.inputs: list[int] = []
        self.nodes: list[OpNode] = []

    def value(self, *shape: int, trains: bool = True) -> int:
        self.values.append(Value(TensorSpec(shape, "float32"), trains))
        return len(self.values) - 1

    def input(self, *shape: int) -> int:
        self.inputs.append(self.value(*shape, trains=False))
        return self.inputs[-1]

    def param(self, *shape: int) -> int:
        self.params.append((f"w{len(self.params)}", self.value(*shape)))
        return self.params[-1][1]

    def node(self, op: str, *ins: int, shape: Sequence[int], module: str = "") -> int:
        out = self.value(*shape)
        self.nodes.append(OpNode(op, module, tuple(Ref(v) for v in ins), (), (out,)))
        return out

    def linear(self, x: int, features: int, weight: int | None = None, module: str = "") -> int:
        shape = self.values[x].shape
        weight = self.param(features, shape[-1]) if weight is None else weight
        return self.node("linear", x, weight, shape=(*shape[:-1], features), module=module)

    def same(self, op: str, *ins: int, module: str = "") -> int:
        return self.node(op, *ins, shape=self.values[ins[0]].shape, module=module)

    def graph(self, *outputs: int) -> OpGraph:
        return OpGraph(tuple(self.values), tuple(self.inputs), tuple(self.params), tuple(self.nodes), outputs)


def random_graph(random: Random, nodes: int) -> OpGraph:
    """Draw a graph of 2-D tensors whose last value is the output.

    A weight may have two users, a value several.
    """
    make = Maker()
    live = [make.input(random.choice((2, 4, 8)), random.choice((2, 4)))]
    for _ in range(nodes):
        x = live[-1] if random.random() < 0.7 else random.choice(live)
        alike = [v for v in live if make.values[v].shape == make.values[x].shape]
        ties = [v for _, v in make.params if make.values[v].shape[1] == make.values[x].shape[1]]
        match random.randrange(4):
            case 0:
                live.append(make.same("relu", x))
            case 1:
                live.append(make.same("add.Tensor", x, random.choice(alike)))
            case 2 if ties:
                weight = random.choice(ties)
                live.append(make.linear(x, make.values[weight].shape[0], weight))
            case _:
                live.append(make.linear(x, random.choice((2, 4, 8))))
    return make.graph(live[-1])


def rules_of(graph: OpGraph) -> tuple[OpRule | None, ...]:
    return tuple(rule_of(node, graph) for node in graph.nodes)


def every_choice(
    graph: OpGraph, rules: Sequence[OpRule | None], ranks: int, written: Mapping[int, OpStrategy]
) -> Iterator[tuple[OpStrategy, ...]]:
    """Yield every choice of strategies that a search of a small graph considers."""
    made = variables(graph, rules, dims_of_model(graph, rules), written, together=False)
    followers = as_written(made, rules, written)
    menus = [dict.fromkeys((*v.states(ranks), *more)) for v, more in zip(made.all, followers, strict=True)]
    for states in itertools.product(*menus):
        yield tuple(strategy for (strategy,) in states)


def cheapest(graph: OpGraph, ranks: int, model: CostModel, written: Mapping[int, OpStrategy], asked: Layouts) -> float:
    """Return the cost of the cheapest choice, by trying all of them."""
    rules = rules_of(graph)
    return min(
        graph_cost(graph, rules, choice, model, asked).predicted
        for choice in every_choice(graph, rules, ranks, written)
    )
