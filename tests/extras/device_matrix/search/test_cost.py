"""The cost of operators under strategies, compared with figures computed by hand."""

from __future__ import annotations

from random import Random

import pytest

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_graph import Name, OpGraph, OpNode, Ref
from launcher.extras.device_matrix.op_rule import OpStrategy
from launcher.extras.device_matrix.search.candidates import dims_of_model
from launcher.extras.device_matrix.search.cost import CostModel, Layouts, graph_cost
from launcher.extras.device_matrix.search.operator_work import forward_flops
from launcher.extras.device_matrix.search.variables import variables
from launcher.extras.device_matrix.sharded_graph import moves, sharded
from tests.extras.device_matrix.search.small_graphs import Maker, random_graph, rules_of

MODEL = CostModel(flops_per_second=1e6, bytes_per_second=1e3, memory_bytes_per_second=1e30, latency=0.5)
WHOLE = OpStrategy((4,))


def cut(**axes: int) -> OpStrategy:
    """Return a strategy that splits these letters over the one axis."""
    return OpStrategy((4,), tuple((x, (a,)) for x, a in axes.items()))


def two_layers() -> OpGraph:
    make = Maker()
    x = make.input(16, 8)
    return make.graph(make.linear(make.same("relu", make.linear(x, 32)), 8))


def test_columns_then_rows_add_up_once_each_way() -> None:
    """The forward has an all-reduce of 16 x 8 floats, of which each rank receives 3/4 twice.

    The input needs no gradient.
    """
    graph = two_layers()
    cost = graph_cost(graph, rules_of(graph), (cut(n=0), cut(d1=0), cut(k=0)), MODEL)
    assert (cost.moved, cost.collectives) == (2 * 3 / 4 * 16 * 8 * 4, 1)
    assert cost.communication == pytest.approx(cost.moved / 1e3 + 0.5)
    assert cost.gradients == 0
    # the first layer has only a gradient of its weight, the second also one of its input
    assert cost.computation == pytest.approx((2 + 3) * 2 * 16 * 8 * 32 / 4 / 1e6)
    assert cost.memory.parameters == 2 * 8 * 32 * 4 / 4
    assert cost.memory.states == 2 * cost.memory.parameters


def test_a_cut_batch_sums_gradients_of_weights_once_a_step() -> None:
    graph = two_layers()
    model = CostModel(bytes_per_second=1e3, micro_batches=5)
    cost = graph_cost(graph, rules_of(graph), (cut(d0=0), cut(d0=0), cut(d0=0)), model)
    assert cost.communication == 0
    assert cost.gradients == pytest.approx(2 * 3 / 4 * 2 * 8 * 32 * 4 / 1e3)


def test_users_of_a_value_with_one_layout_share_its_redistribution() -> None:
    make = Maker()
    x = make.linear(make.input(16, 8), 8)
    graph = make.graph(make.same("relu", x), make.same("sin", x), make.same("cos", x))
    rules = rules_of(graph)
    once = graph_cost(graph, rules, (cut(n=0), cut(d0=0), cut(d1=0), cut(d1=0)), MODEL)
    thrice = graph_cost(graph, rules, (cut(n=0), cut(d0=0), cut(d0=0), cut(d0=0)), MODEL)
    assert once.collectives == thrice.collectives == 2  # forward and backward
    assert once.moved == thrice.moved


def test_a_parameter_taken_in_two_ways_moves_with_every_micro_batch() -> None:
    make = Maker()
    x = make.input(16, 8)
    weight = make.param(8, 8)
    graph = make.graph(make.linear(make.linear(x, 8, weight), 8, weight))
    rules = rules_of(graph)
    alike = graph_cost(graph, rules, (cut(d0=0), cut(d0=0)), MODEL)
    unlike = graph_cost(graph, rules, (cut(n=0), WHOLE), MODEL)
    assert (alike.gradients > 0, alike.moved) == (True, 0)
    assert unlike.gradients == 0
    # the second gathers the weight and the output of the first; gradients come back in full and are sliced
    assert (unlike.moved, unlike.collectives) == (3 / 4 * (8 * 8 + 16 * 8) * 4, 2)


def test_an_input_with_a_layout_is_moved_to_where_it_is_taken() -> None:
    graph = two_layers()
    asked = Layouts({graph.inputs[0]: TensorLayout((4,), ((0,), ()))})
    free = graph_cost(graph, rules_of(graph), (WHOLE,) * 3, MODEL)
    gathered = graph_cost(graph, rules_of(graph), (WHOLE,) * 3, MODEL, asked)
    assert free.moved == 0
    assert (gathered.moved, gathered.collectives) == (3 / 4 * 16 * 8 * 4, 1)


@pytest.mark.parametrize("seed", range(40))
def test_moves_are_those_of_the_sharded_graph(seed: int) -> None:
    """They agree to a few bytes: tensors with equal splits are planned once, with their dims in another order."""
    random = Random(seed)
    graph, ranks = random_graph(random, random.randint(1, 8)), random.choice((2, 4, 6, 8))
    rules = rules_of(graph)
    made = variables(graph, rules, dims_of_model(graph, rules), {}, together=False)
    chosen = tuple(random.choice(v.states(ranks))[0] for v in made.all)
    arrives = {graph.inputs[0]: TensorLayout.replicated(2, ranks)}

    true = sharded(graph, rules, chosen, known_layouts=arrives, outputs=[None])
    every = [m for move in moves(true) for m in (move.forward, move.backward) if m is not None]
    cost = graph_cost(graph, rules, chosen, MODEL, Layouts(arrives))
    assert cost.collectives == sum(m.collectives for m in every)
    assert cost.moved == pytest.approx(4 * sum(m.elements for m in every), rel=0.05)


@pytest.mark.parametrize(
    ("op", "ins", "out", "args", "flops"),
    [
        ("linear", [(4, 8, 16), (32, 16)], (4, 8, 32), (), 2 * 4 * 8 * 16 * 32),
        ("matmul", [(4, 8, 16), (4, 16, 32)], (4, 8, 32), (), 2 * 4 * 8 * 16 * 32),
        ("addmm", [(32,), (8, 16), (16, 32)], (8, 32), (), 2 * 8 * 16 * 32),
        ("conv2d", [(2, 4, 8, 8), (6, 4, 3, 3)], (2, 6, 6, 6), (), 2 * 2 * 6 * 36 * 4 * 9),
        ("relu", [(8, 16)], (8, 16), (), 0),
        ("scaled_dot_product_attention", [(2, 4, 8, 16)] * 3, (2, 4, 8, 16), (None, 0.0, False), 4 * 2 * 4 * 64 * 16),
        ("scaled_dot_product_attention", [(2, 4, 8, 16)] * 3, (2, 4, 8, 16), (None, 0.0, True), 2 * 2 * 4 * 64 * 16),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_flops_of_an_operator_follow_from_its_shapes(
    op: str,
    ins: list[tuple[int, ...]],
    out: tuple[int, ...],
    args: tuple[Name | float | None, ...],
    flops: int,
) -> None:
    make = Maker()
    refs = tuple(Ref(make.value(*shape)) for shape in ins)
    node = OpNode(op, "", (*refs, *args), (), (make.value(*out),))
    assert forward_flops(OpGraph(tuple(make.values), (), (), (node,), ()), node) == flops
