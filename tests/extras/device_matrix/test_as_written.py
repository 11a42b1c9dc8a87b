"""Strategies over device matrices are written to a file and read back unchanged."""

from __future__ import annotations

import json
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_graph import OpGraph, OpNode, Ref, Value
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.written_strategies import as_written, read
from launcher.plan.tensor_parallel import operator_strategy_file
from launcher.plan.values.tensor_spec import TensorSpec

N = 216
MATMUL = OpRule((("m", "k"), ("k", "n")), (("m", "n"),), (("m", N), ("k", N), ("n", N)), sums=("k",))
GRAPH = OpGraph(
    values=(Value(TensorSpec((N, N), "float32"), trains=True),) * 3,
    inputs=(0,),
    params=(("up.weight", 1),),
    nodes=(OpNode("mm", "up", (Ref(0), Ref(1)), (), (2,)),),
    outputs=(2,),
)
SIZES = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3).map(tuple)


@st.composite
def cuts(draw: st.DrawFn, matrix: tuple[int, ...], places: str) -> dict[str, tuple[int, ...]]:
    """Draw for each axis at most one of the places, in any order."""
    axes = draw(st.permutations(range(len(matrix))))
    homes = [draw(st.sampled_from([*places, ""])) for _ in axes]
    return {place: tuple(a for a, home in zip(axes, homes, strict=True) if home == place) for place in places}


@given(st.data(), SIZES, st.booleans())
def test_what_is_written_is_read_back_through_a_file(data: st.DataObject, matrix: tuple[int, ...], out: bool) -> None:
    found = data.draw(cuts(matrix, "mkn"))
    strategy = OpStrategy(matrix, tuple((letter, axes) for letter, axes in found.items() if axes))
    leaves = TensorLayout(matrix, tuple(data.draw(cuts(matrix, "01")).values())) if out else None
    rows = {"up": {**as_written(strategy, MATMUL, leaves), operator_strategy_file.NAME_KEY: "u*"}}

    text = operator_strategy_file.text(rows, tp=None)
    tp, config, origins = operator_strategy_file.parsed(json.loads(text), "parallel.operator_strategy.load", "o.json")
    assert (tp, origins["up"].key) == (None, "u*")
    (got,), problems = read(config, GRAPH, [MATMUL], names=["up:mm"], ranks=prod(matrix), origins=origins)
    assert problems == []
    assert (got.strategy.matrix, got.strategy.of, got.out) == (matrix, strategy.of, leaves)
