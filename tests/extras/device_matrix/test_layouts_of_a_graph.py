"""Layouts from strategies: how they are read, what unwritten ones become, and how parameters are stored."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import Problem
from launcher.extras.device_matrix.hsdp import at_rest
from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_graph import OpGraph, OpNode, Ref, Value
from launcher.extras.device_matrix.op_rule import OpStrategy
from launcher.extras.device_matrix.operator_names import operator_names
from launcher.extras.device_matrix.resolve import assign
from launcher.extras.device_matrix.rules.table import rule_of
from launcher.extras.device_matrix.sharded_graph import ShardedGraph, sharded
from launcher.extras.device_matrix.written_operator import Written
from launcher.extras.device_matrix.written_strategies import read, unmatched
from launcher.job.schema.parallel import Hsdp
from launcher.plan.values.resolved import StrategyOrigin
from launcher.plan.values.tensor_spec import TensorSpec
from tests.extras.device_matrix import layouts

RANKS = 8


def tensor(*shape: int) -> Value:
    return Value(TensorSpec(shape, "float32"), trains=True)


GRAPH = OpGraph(
    values=(tensor(16, 32), tensor(64, 32), tensor(64), tensor(16, 64), tensor(16, 64), tensor(24, 64), tensor(16, 24)),
    inputs=(0,),
    params=(("up.weight", 1), ("up.bias", 2), ("down.weight", 5)),
    nodes=(
        OpNode("linear", "up", (Ref(0), Ref(1), Ref(2)), (), (3,)),
        OpNode("relu", "act", (Ref(3),), (), (4,)),
        OpNode("linear", "down", (Ref(4), Ref(5)), (), (6,)),
    ),
    outputs=(6,),
)
"""relu(x @ up.T + b) @ down.T"""
RULES = tuple(rule_of(n, GRAPH) for n in GRAPH.nodes)
(NAMES,) = operator_names([GRAPH])


def written(config: dict[str, Any], ranks: int = RANKS) -> tuple[Written, ...]:
    found, problems = read(config, GRAPH, RULES, names=NAMES, ranks=ranks)
    assert problems == []
    return found


def up(value: dict[str, Any]) -> tuple[TensorLayout, ...]:
    """Return the layouts of the input, the weight and the bias of the first product."""
    (one,) = written({"up": value})
    rule = RULES[0]
    assert rule is not None
    return tuple(one.strategy.takes(rule, i) for i in range(3))


SAME = {
    "weight as torch keeps it": {"in": [[2, 1], [4, 1]]},
    "weight as a matrix product takes it": {"in": [[2, 1], [1, 4]]},
    "by the names of parameters": {"input": [2, 1], "weight": [4, 1]},
    "by names of axes": {"matrix": [2, 4], "axes": ["x", "y"], "in": [["x", None], ["y", None]]},
    "by names of axes, as a matrix product": {"matrix": [2, 4], "axes": ["x", "y"], "in": [["x", None], [None, "y"]]},
}


@pytest.mark.parametrize("value", SAME.values(), ids=SAME)
def test_a_strategy_may_be_written_in_many_ways(value: dict[str, Any]) -> None:
    assert up(value) == (
        TensorLayout((2, 4), ((0,), ())),
        TensorLayout((2, 4), ((1,), ())),
        TensorLayout((2, 4), ((1,),)),
    )


def test_ranks_that_slices_do_not_use_become_the_innermost_axis() -> None:
    assert up({"in": [[2, 1]]})[0] == TensorLayout((2, 4), ((0,), ()))
    assert up({"matrix": [4], "axes": ["x"], "in": [[None, "x"]]})[1] == TensorLayout((4, 2), ((), (0,)))


def test_a_dim_may_be_cut_by_two_axes_in_any_order() -> None:
    (x, _, _) = up({"matrix": [2, 4], "axes": ["x", "y"], "in": [[["y", "x"], None]]})
    assert x == TensorLayout((2, 4), ((1, 0), ()))
    assert [x.part((1, 0), rank) for rank in range(RANKS)] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_an_output_is_on_the_axes_of_its_operator_where_they_cut_so() -> None:
    (own,) = written({"up": {"in": [[2, 1], [4, 1]], "out": [[2, 4]]}})
    (other,) = written({"up": {"in": [[2, 1], [4, 1]], "out": [[8, 1]]}})
    assert (own.out, other.out) == (TensorLayout((2, 4), ((0,), (1,))), TensorLayout((8,), ((0,), ())))


def test_an_exact_name_beats_a_glob_and_a_later_glob_an_earlier_one() -> None:
    config = {"*p": {"in": [[2, 1]]}, "act": {"in": [[4, 1]]}, "a*": {"in": [[8, 1]]}, "d*": {"in": [[8, 1]]}}
    found = {GRAPH.nodes[w.node].module: w for w in written(config)}
    assert {m: (w.key, w.strategy.matrix) for m, w in found.items()} == {
        "up": ("*p", (2, 4)), "act": ("act", (4, 2)), "down": ("d*", (8,)),
    }  # fmt: skip
    assert unmatched(config, ["up", "act", "down"]) == []


def test_a_problem_in_a_strategy_of_a_file_names_the_file() -> None:
    load = "parallel.operator_strategy.load"
    origins = {"up": StrategyOrigin(load, "o.json")}
    _, (problem,) = read({"up": {"in": [[3, 1]]}}, GRAPH, RULES, names=NAMES, ranks=RANKS, origins=origins)
    assert problem == Problem(load, "o.json: up: in[0]: [3, 1]: dim 0 of [16, 32] is not a multiple of 3")


def test_a_module_none_of_whose_operators_has_a_rule_is_refused() -> None:
    _, (problem,) = read({"act": {"in": [[2, 1]]}}, GRAPH, [RULES[0], None, RULES[2]], names=NAMES, ranks=RANKS)
    text = "none of its operators can be cut: there is no rule for aten.relu"
    assert problem == Problem("parallel.operators.act", text, "'~parallel.operators.act'")


def sharded_as(config: dict[str, Any]) -> ShardedGraph:
    given = {0: TensorLayout((8,), ((0,), ()))}
    own = {w.node: w.strategy for w in written(config)}
    strategies = assign(GRAPH, RULES, RANKS, written=own, at_inputs=given, rests={})
    return sharded(GRAPH, RULES, strategies, known_layouts=given, outputs=[None])


def test_nothing_written_is_data_parallelism() -> None:
    graph = sharded_as({})
    assert [s.matrix for s in graph.strategies] == [(8,)] * 3
    assert all(graph.still(t) for t in graph.taken if t.value not in graph.params)
    assert [graph.summed_later(v) for _, v in GRAPH.params] == [(0,)] * 3


def test_an_operator_without_weights_takes_the_layout_of_its_input() -> None:
    graph = sharded_as({"up": {"in": [[2, 1], [4, 1]]}})
    assert graph.strategies[1] == OpStrategy((2, 4), (("d0", (0,)), ("d1", (1,))))
    assert graph.layouts[3] == graph.layouts[4] == TensorLayout((2, 4), ((0,), (1,)))


def test_a_cut_sum_is_made_in_terms_and_rests_as_its_first_user_takes_it() -> None:
    graph = sharded_as({"up": {"in": [[1, 8]]}, "act": {"in": [[8, 1]]}})
    assert graph.made[3] == TensorLayout((8,), ((), ()), (0,))
    assert graph.layouts[3] == TensorLayout((8,), ((0,), ()))


def test_a_gradient_is_summed_over_the_axes_that_cut_the_operator_and_not_the_tensor() -> None:
    graph = sharded_as({"up": {"in": [[2, 1], [4, 1]]}})
    terms = {t.value: t.terms for t in graph.taken}
    assert (terms[0], terms[1], terms[2]) == ((1,), (0,), (0,))


BIG = TensorSpec((48, 65536), "float32")
REST = {
    "all replicas": (Hsdp(), BIG, 8),
    "a shard size": (Hsdp(shard_size=2), BIG, 4),
    "a shard size between": (Hsdp(shard_size=3), BIG, 4),
    "below the threshold": (Hsdp(threshold=64), TensorSpec((48, 16), "float32"), 2),
    "a threshold of nothing": (Hsdp(threshold=0), TensorSpec((48, 16), "float32"), 8),
    "dim 0 has no more": (Hsdp(), TensorSpec((12, 65536), "float32"), 4),
    "no number": (Hsdp(threshold=0), TensorSpec((), "float32"), None),
}


@pytest.mark.parametrize("case", REST)
def test_a_parameter_is_shared_out_over_its_replicas(case: str) -> None:
    hsdp, spec, slices = REST[case]
    used = TensorLayout((2, 4), ((0,), ())) if slices else TensorLayout.replicated(0, RANKS)
    rest = at_rest(used, spec, hsdp)
    if slices is None:
        assert rest == used
        return
    assert rest.slices == (slices, 1)
    assert all(rest.box(spec.shape, r).lo[0] >= used.box(spec.shape, r).lo[0] for r in range(RANKS))
    assert all(rest.box(spec.shape, r).hi[0] <= used.box(spec.shape, r).hi[0] for r in range(RANKS))


@given(st.integers(0, 10**9), st.sampled_from([2, 4, 6, 8, 12]), st.integers(1, 3))
def test_a_canonical_layout_has_the_same_boxes_on_every_rank(seed: int, ranks: int, dims: int) -> None:
    layout = layouts.drawn(ranks, dims, random.Random(seed), partial=True)
    for other in (layout.canonical, layout.over_primes):
        assert prod(other.matrix) == ranks
        assert all(other.box(layout.slices, r) == layout.box(layout.slices, r) for r in range(ranks))
        assert prod(other.matrix[a] for a in other.partial) == prod(layout.matrix[a] for a in layout.partial)
    assert layout.over_primes.canonical == layout.canonical.canonical == layout.canonical


def test_an_axis_of_one_does_not_keep_its_neighbors_apart() -> None:
    assert TensorLayout((2, 1, 2), ((0, 1, 2),)).canonical == TensorLayout((4,), ((0,),))
