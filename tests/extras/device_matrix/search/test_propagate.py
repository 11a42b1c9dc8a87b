"""Inferred strategies cost no more than the cheapest choice, fit in memory, and keep those that were written."""

from __future__ import annotations

from math import prod
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.op_rule import OpStrategy
from launcher.extras.device_matrix.search.candidates import dims_of_model
from launcher.extras.device_matrix.search.cost import CostModel, Layouts, graph_cost
from launcher.extras.device_matrix.search.explore import propagate
from launcher.extras.device_matrix.search.variables import variables
from tests.extras.device_matrix.search.small_graphs import Maker, cheapest, every_choice, random_graph, rules_of

SLOW = CostModel(flops_per_second=1e9, bytes_per_second=1e9, memory_bytes_per_second=1e10, latency=1e-9, state_bytes=8)
"""A cost model with which it is worth splitting small graphs."""
MODELS = (CostModel(), CostModel(latency=0), SLOW, CostModel(latency=0, bytes_per_second=1e13, flops_per_second=1e9))
MOST = 8000
"""The most choices that are tried one by one."""


def drawn(seed: int) -> tuple[OpGraph, int, CostModel, dict[int, OpStrategy]] | None:
    """Draw a graph, ranks, a cost model and written strategies; ``None`` if there are too many choices to try."""
    random = Random(seed)
    graph, ranks = random_graph(random, random.randint(1, 6)), random.choice((2, 3, 4, 6, 8))
    rules = rules_of(graph)
    menus = [v.states(ranks) for v in variables(graph, rules, dims_of_model(graph, rules), {}, together=False).all]
    if prod(map(len, menus)) > MOST:
        return None
    written = {}
    if random.random() < 0.5:
        at = random.randrange(len(menus))
        written[at] = random.choice(menus[at])[0]
    return graph, ranks, random.choice(MODELS), written


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 16))
def test_nothing_is_cheaper_among_all_choices(seed: int) -> None:
    case = drawn(seed)
    if case is None:
        return
    graph, ranks, model, written = case
    rows = TensorLayout((ranks,), ((0,), ()))
    asked = Layouts({v: rows for v in graph.inputs if rows.divides(graph.values[v].shape) and seed % 2})
    found = propagate(graph, rules_of(graph), ranks, written, model, requested=asked)
    assert all(found.strategies[at] == strategy for at, strategy in written.items())
    best = cheapest(graph, ranks, model, written, asked)
    assert found.cost.predicted <= 1.01 * best
    assert found.cost == graph_cost(graph, rules_of(graph), found.strategies, model, asked)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1 << 16), st.floats(0, 1))
def test_it_fits_into_memory_where_anything_does(seed: int, part: float) -> None:
    case = drawn(seed)
    if case is None:
        return
    graph, ranks, model, written = case
    rules = rules_of(graph)
    sizes = [
        graph_cost(graph, rules, choice, model).memory.total for choice in every_choice(graph, rules, ranks, written)
    ]
    limit = (0.9 + 0.1 * part) * min(sizes) + part * (max(sizes) - min(sizes))
    found = propagate(graph, rules, ranks, written, model, memory=limit)
    if min(sizes) <= limit:
        assert found.lacking == 0
        assert found.cost.memory.total <= limit
    else:
        assert found.cost.memory.total == pytest.approx(min(sizes))
        assert found.lacking == pytest.approx(min(sizes) - limit)


def mlp(batch: int) -> OpGraph:
    make = Maker()
    x = make.input(batch, 1024)
    for n in range(3):
        x = make.same("relu", make.linear(x, 1024, module=f"layers.{n}"), module=f"layers.{n}")
    return make.graph(x)


def test_inputs_cut_in_batch_give_data_parallelism() -> None:
    graph = mlp(1 << 16)
    cut = TensorLayout((8,), ((0,), ()))
    found = propagate(graph, rules_of(graph), 8, {}, requested=Layouts({graph.inputs[0]: cut}))
    assert {s.axes for s in found.strategies} == {(("d0", (0,)),)}
    assert found.cost.communication == 0
    assert tuple(map(str, found.reasons)) == (
        "inferred: layers.* (3): batch, saves an all-gather of 224.0 MB",
        "inferred: layers.* (3), 1 light operator: batch",
    )


def test_a_repeated_search_gives_the_same_strategies_and_reasons() -> None:
    graph = mlp(1 << 10)
    once, again = (propagate(graph, rules_of(graph), 8, {}, SLOW) for _ in range(2))
    assert once == again
    assert str(once.reasons[0]) == "inferred: layers.*: columns, saves a reduce-scatter of 3.5 MB"


def test_neighbors_follow_axes_in_an_order_of_their_own() -> None:
    """The strategy is as written by a user whose ranks 0, 1, 2, 3, ... have slices 0, 4, 1, 5, ... of the batch."""
    graph = mlp(1 << 16)
    strided = OpStrategy((4, 2), (("d0", (1, 0)),))
    found = propagate(graph, rules_of(graph), 8, {3: strided})
    assert set(found.strategies) == {strided}
    assert found.cost.communication == 0


def test_an_operator_without_a_rule_is_not_cut() -> None:
    make = Maker()
    x = make.linear(make.input(8, 8), 8)
    graph = make.graph(make.linear(make.same("odd", x), 8))
    found = propagate(graph, rules_of(graph), 4, {}, SLOW)
    assert found.strategies[1] == OpStrategy((4,))
    assert found.cost.communication > 0


def test_hsdp_divides_the_memory_of_parameters_and_their_states() -> None:
    graph = mlp(1 << 16)
    cut = Layouts({graph.inputs[0]: TensorLayout((8,), ((0,), ()))})
    plain, sharded = (
        propagate(graph, rules_of(graph), 8, {}, CostModel(optimizer_level=n), requested=cut) for n in (0, 3)
    )
    weights = 3 * 1024 * 1024 * 4
    assert (plain.cost.memory.parameters, plain.cost.memory.states) == (weights, 2 * weights)
    assert (sharded.cost.memory.parameters, sharded.cost.memory.states) == (weights / 8, weights / 4)
    assert sharded.cost.gradients == pytest.approx(1.5 * plain.cost.gradients)
