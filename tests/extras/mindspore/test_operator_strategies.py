"""Operator strategies that MindSpore saved become those of the modules with the same names."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.extras.mindspore import operator_strategies
from launcher.extras.mindspore.operator_strategies import strategies
from launcher.plan.tensor_parallel.module_strategies import resolve
from launcher.plan.tensor_parallel.strategy_reader import degree
from launcher.plan.values.grid import Grid
from launcher.plan.values.model_graph import ModelStructure, Param
from tests.extras.mindspore.truth import FIXTURES, exactly
from tests.plan.made import spec

REAL = FIXTURES / "real_strategy" / "opjson_ops.json"
KEY = "parallel.operator_strategy.load"
MODEL = ModelStructure(
    ("layers", "layers.0", "layers.1", "table", "loss"),
    (
        *(
            Param(f"layers.{i}.weight", spec(*shape), f"layers.{i}.weight")
            for i, shape in enumerate([(32, 16), (16, 32)])
        ),
        Param("table.weight", spec(8, 16), "table.weight"),
    ),
    frozenset(),
    (("layers.0", "linear"), ("layers.1", "linear"), ("table", "embedding")),
)
GRID = Grid.of(pp=1, dp_replicate=2, dp_shard=1, tp=4)
BLOCK = "Default/network-Net/layers-CellList/0-Dense"


def read(data: Any, model: ModelStructure = MODEL) -> dict[str, str]:
    """Return how each module is split."""
    config, origins = strategies(operator_strategies.node_strategies(data), KEY, "o.json")
    found, problems = resolve(config, model, GRID, origins)
    assert problems == []
    return {o.module: o.mode for o in found}


def test_a_real_file_comes_out_byte_for_byte() -> None:
    data = REAL.read_bytes()
    assert operator_strategies.is_mindspores(json.loads(data))
    assert operator_strategies.node_text(operator_strategies.node_strategies(json.loads(data))) == data


def test_a_real_file_cuts_the_modules_of_the_model_whatever_is_around_it() -> None:
    config, _ = strategies(operator_strategies.node_strategies(json.loads(REAL.read_bytes())), KEY, "o.json")
    assert degree(config) == (4, "")
    assert read(json.loads(REAL.read_bytes())) == {"layers.0": "column", "layers.1": "row"}


def items(**ops: list[list[int]]) -> dict[str, Any]:
    """Return the slices of operators in the first layer, in MindSpore's form."""
    nodes = {f"{BLOCK}/{op}-op0": {"parallel_strategy": slices, "stage": 0} for op, slices in ops.items()}
    return {"current_stage": 0, "parallel_strategy_item": nodes}


def test_a_layer_goes_by_its_matmul_and_its_bias_follows() -> None:
    assert read(items(MatMul=[[2, 1], [4, 1]], BiasAdd=[[2, 4], [4]])) == {"layers.0": "column"}


def test_a_table_comes_first() -> None:
    data = {"parallel_strategy_item": {"Default/table-Embedding/Gather-op3": {"parallel_strategy": [[4, 1], [2, 1]],
                                                                              "stage": 0}}}  # fmt: skip
    assert read(data) == {"table": "vocabulary"}


def test_layouts_over_a_device_matrix_are_those_of_the_same_axes() -> None:
    x = {"dev_matrix": [2, 4], "alias_name": ["a", "b"], "interleaved_parallel": False, "tensor_map": [[1], [0]]}
    node = f"{BLOCK}/MatMul-op0"
    data = {
        "parallel_strategy_item": {node: {"parallel_strategy": [], "stage": 0}},
        "parallel_layout_value_item": {node: {"0": x, "1": x | {"tensor_map": [[-1], [0]]}}},
        "parallel_out_layout_value_item": {node: {"0": x | {"tensor_map": [[1], [-1]]}}},
    }
    assert read(data) == {"layers.0": "row"}
    file = operator_strategies.node_strategies(data)
    assert operator_strategies.node_strategies(json.loads(operator_strategies.node_text(file))) == file


def layouts(**changes: Any) -> dict[str, Any]:
    x = {"dev_matrix": [8], "alias_name": ["a"], "interleaved_parallel": False, "tensor_map": [[0], [-1]]}
    return {"parallel_strategy_item": {}, "parallel_layout_value_item": {"MatMul-op0": {"0": x | changes}}}


AT = "parallel_layout_value_item: MatMul-op0"
UNREADABLE: dict[str, tuple[Any, str]] = {
    "several operators": (
        items(MatMul=[[2, 1], [4, 1]], ReLU=[[2, 4]]),
        "network.layers.0: strategies of 2 operators (MatMul, ReLU); a module can have only one",
    ),
    "two of a kind": (
        {"parallel_strategy_item": {f"{BLOCK}/MatMul-op{i}": {"parallel_strategy": [[1]], "stage": 0} for i in (0, 1)}},
        "network.layers.0: strategies of 2 operators (MatMul); a module can have only one",
    ),
    "another shape": (
        {"parallel_strategy_item": {}, "parallel_newshape_layout_value_item": {"a": {}}},
        "parallel_newshape_layout_value_item: layouts of reshaped tensors are not supported",
    ),
    "interleaved": (layouts(interleaved_parallel=True), f"{AT}: interleaved_parallel is not available"),
    "axis": (layouts(tensor_map=[[1]]), f"{AT}: tensor_map has [1]: the device matrix has 1 axes"),
    "names": (layouts(alias_name=["a", "b"]), f"{AT}: alias_name is ['a', 'b']; it must name each axis of [8]"),
    "slices": (
        items(MatMul=[[0]]),
        f"parallel_strategy_item: {BLOCK}/MatMul-op0: parallel_strategy is [0], not a list of whole numbers from 1",
    ),
    "stage": (
        {"parallel_strategy_item": {"a": {"parallel_strategy": []}}},
        "parallel_strategy_item: a: stage is None, not a whole number",
    ),
    "places": (
        {"parallel_strategy_item": {}, "parallel_layout_value_item": {"a": {"1": {}}}},
        "parallel_layout_value_item: a: layouts of tensors ['1']; they must be 0, 1, ...",
    ),
}


@pytest.mark.parametrize(("data", "told"), UNREADABLE.values(), ids=UNREADABLE)
def test_operator_strategies_that_cannot_be_read_are_named(data: Any, told: str) -> None:
    with pytest.raises(ValueError, match=exactly(told)):
        strategies(operator_strategies.node_strategies(data), KEY, "o.json")


SCALARS = st.none() | st.booleans() | st.integers(-1, 3) | st.sampled_from(["", "a", "0", "x/MatMul-op0"])
KEYS = st.sampled_from(
    ["0", "1", "dev_matrix", "alias_name", "tensor_map", "parallel_strategy", "stage", "interleaved_parallel", "a/\n/"]
)
ANY = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4))
PARTS = [
    "parallel_strategy_item", "parallel_out_strategy_item", "parallel_layout_value_item",
    "parallel_out_layout_value_item", "launcher.keys",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(PARTS), ANY | st.dictionaries(st.sampled_from(["", "a/", "b/c"]), ANY)))
def test_any_json_is_read_or_refused(data: dict[str, Any]) -> None:
    with suppress(ValueError):
        config, origins = strategies(operator_strategies.node_strategies(data), KEY, "o.json")
        resolve(config, MODEL, GRID, origins)


def node(scope: str, op: str) -> dict[str, Any]:
    return {f"Default/{scope}/{op}-op0": {"parallel_strategy": [[2, 1], [4, 1]], "stage": 0}}


MISPLACED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": (
        node("network-Net/layers-CellList/7-Dense", "MatMul"),
        "network.layers.7: no module has this name; modules are layers, table, loss",
    ),
    "own forward": (
        node("layers-CellList", "ReLU") | node("layers-CellList/0-Dense", "MatMul"),
        "layers: ReLU is called in its own forward, but only modules can have strategies",
    ),
    "twice": (
        node("a-A/layers-CellList/0-Dense", "MatMul") | node("b-B/layers-CellList/0-Dense", "MatMul"),
        "b.layers.0: means module layers.0, and so does a.layers.0",
    ),
}


@pytest.mark.parametrize(("nodes", "told"), MISPLACED.values(), ids=MISPLACED)
def test_strategies_of_what_the_model_has_not_are_refused(nodes: dict[str, Any], told: str) -> None:
    found, origins = strategies(operator_strategies.node_strategies({"parallel_strategy_item": nodes}), KEY, "o.json")
    _, problems = resolve(found, MODEL, GRID, origins)
    assert list(map(str, problems)) == [f"{KEY}: o.json: {told}"]
