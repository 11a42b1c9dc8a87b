"""Many equal layers are searched as a few layers, one of which counts for the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.search.candidates import dims_of_model
from launcher.extras.device_matrix.search.cost import CostModel, Layouts, fixed_layouts, graph_cost
from launcher.extras.device_matrix.search.explore import propagate
from launcher.extras.device_matrix.search.repeats import shortened
from launcher.extras.device_matrix.search.tables import Pricer, search
from launcher.extras.device_matrix.search.variables import variables
from tests.extras.device_matrix.search.small_graphs import Maker, rules_of


def residual(layers: int, kept: int | None = None) -> OpGraph:
    """Return a graph of residual layers; the output of layer ``kept`` is also an output of the graph."""
    make = Maker()
    x, leaves = make.linear(make.input(512, 64), 64, module="embed"), []
    for n in range(layers):
        h = make.same("relu", make.linear(x, 256, module=f"layers.{n}.up"), module=f"layers.{n}")
        x = make.same("add.Tensor", x, make.linear(h, 64, module=f"layers.{n}.down"), module=f"layers.{n}")
        leaves += [x] if n == kept else []
    graph = make.graph(make.linear(x, 64, module="head"), *leaves)
    params = tuple((f"{n}.w", v) for n, (_, v) in zip(_owners(graph), graph.params, strict=True))
    return replace(graph, params=params)


def _owners(graph: OpGraph) -> list[str]:
    return [node.module for node in graph.nodes if node.kind == "linear"]


def pricer(graph: OpGraph, weights: tuple[int, ...] | None = None) -> Pricer:
    return Pricer(graph, rules_of(graph), CostModel(), fixed_layouts(graph, 4, Layouts()), weights)


def test_first_two_and_last_of_equal_layers_are_kept() -> None:
    graph = residual(9)
    short = shortened(graph, pricer(graph).signatures)
    assert [n.module for n in short.graph.nodes if n.kind == "add"] == [f"layers.{n}" for n in (0, 1, 2, 8)]
    assert sum(short.weights) == len(graph.nodes)
    assert [graph.nodes[n].op for n in range(len(graph.nodes))] == [short.graph.nodes[n].op for n in short.of]


def test_a_layer_that_gives_to_others_stays() -> None:
    graph = residual(9, kept=4)
    assert shortened(graph, pricer(graph).signatures).graph == graph


def test_a_layer_counts_for_those_left_out() -> None:
    """If all layers are split alike, the few cost as much as the many."""
    graph = residual(30)
    short = shortened(graph, pricer(graph).signatures)
    costs = []
    for g, weights in ((graph, None), (short.graph, short.weights)):
        made = variables(g, rules_of(g), dims_of_model(g, rules_of(g)), {}, together=False)
        found = search(pricer(g, weights), made, [v.states(4)[-1:] for v in made.all]).cheapest()
        costs.append((found.seconds, found.memory))
        if weights is None:
            true = graph_cost(g, rules_of(g), found.strategies(made), CostModel())
            assert found.seconds == pytest.approx(true.predicted)
            assert found.memory == pytest.approx(true.memory.total)
    assert costs[0] == pytest.approx(costs[1])


def test_many_layers_are_cut_as_if_all_had_been_looked_at() -> None:
    slow = CostModel(flops_per_second=1e9, bytes_per_second=1e9, memory_bytes_per_second=1e10, latency=1e-9)
    graph = residual(24)
    found = propagate(graph, rules_of(graph), 4, {}, slow)
    everything = pricer(graph)
    everything.model = slow
    made = variables(graph, rules_of(graph), dims_of_model(graph, rules_of(graph)), {}, together=False)
    best = search(everything, made, [v.states(4) for v in made.all]).cheapest()
    assert found.cost.predicted == pytest.approx(best.seconds)
