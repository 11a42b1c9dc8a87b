"""Operator strategies, in every form in which they can be written, become splits of parameters and activations."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.plan.tensor_parallel.module_strategies import Operator, resolve, splits
from launcher.plan.values.grid import Grid
from launcher.plan.values.model_graph import ModelStructure, Param
from tests.plan.made import spec

KINDS = {"embed": "embedding", "up": "linear", "norm": "norm", "act": "elementwise", "head": "linear"}
SHAPES = {"embed.weight": (8, 6), "up.weight": (12, 6), "up.bias": (12,), "norm.weight": (6,), "head.weight": (8, 6)}


def model(tied: bool = False) -> ModelStructure:
    same = {"head.weight": "embed.weight"} if tied else {}
    params = tuple(Param(n, spec(*shape), same.get(n, n)) for n, shape in SHAPES.items())
    return ModelStructure((*KINDS, "other"), params, frozenset(), tuple(KINDS.items()))


def grid(dp: int = 1, tp: int = 2) -> Grid:
    return Grid.of(pp=1, dp_replicate=dp, dp_shard=1, tp=tp)


def operator(module: str, value: dict[str, Any], dp: int = 1, tp: int = 2) -> Operator:
    found, problems = resolve({module: value}, model(), grid(dp, tp))
    assert problems == []
    return found[0]


def wrong(config: dict[str, Any], dp: int = 1, tp: int = 2, tied: bool = False) -> list[str]:
    _, problems = resolve(config, model(tied), grid(dp, tp))
    assert problems
    return [str(p) for p in problems]


MP = {"device_matrix": [2, 2], "alias_name": ["dp", "mp"]}
COLUMN: list[dict[str, Any]] = [
    {"weight": ["tp", None]},
    {"weight": [["tp"], "None"]},
    {"in": [[1, 1], [2, 1]]},
    {"in": [[1, 1], [1, 2]]},
    {"in": [[2, 1], [2, 1]]},
    {"in": [[2, 1], [1, 2]]},
    {"layout": MP, "in": [["dp", None], ["mp", None]]},
    {"layout": MP, "in": [["dp", None], [None, "mp"]]},
    {"layout": MP, "weight": [["mp"], None]},
]
ROW: list[dict[str, Any]] = [
    {"weight": [None, "tp"]},
    {"in": [[1, 2], [2, 1]]},
    {"in": [[1, 2], [1, 2]]},
    {"in": [["dp", "tp"], [None, "tp"]]},
    {"layout": MP, "in": [["dp", "mp"], ["mp", None]]},
]


@pytest.mark.parametrize("value", COLUMN, ids=str)
def test_a_linear_layer_is_cut_on_its_outputs_with_its_bias(value):
    got = operator("up", value, dp=2)
    assert (got.mode, dict(got.weights)) == ("column", {"weight": (("tp",), ()), "bias": (("tp",),)})


@pytest.mark.parametrize("value", ROW, ids=str)
def test_a_linear_layer_is_cut_on_its_inputs_and_keeps_its_bias_whole(value):
    got = operator("up", value, dp=2)
    assert (got.mode, dict(got.weights)) == ("row", {"weight": ((), ("tp",)), "bias": ((),)})


def test_an_embedding_is_cut_over_the_vocabulary_or_the_width_with_the_table_second_or_first():
    assert operator("embed", {"in": [[1, 1], [2, 1]]}, dp=4).mode == "vocabulary"
    assert operator("embed", {"in": [[2, 1], [1, 1]]}).mode == "vocabulary"
    assert operator("embed", {"in": [[4, 1], [1, 2]]}, dp=4).mode == "hidden"
    assert operator("embed", {"in": [[1, 2], [4, 1]]}, dp=4).mode == "hidden"
    assert operator("embed", {"weight": [None, "tp"]}).mode == "hidden"


def test_a_tuple_of_axes_cuts_one_dim_by_both():
    got = operator("norm", {"input": [["dp", "tp"], None]}, dp=2)
    assert got.input == (("dp", "tp"), ())
    layout = {"layout": MP, "in": [[["dp", "mp"], None]]}
    assert operator("norm", layout, dp=2).input == (("dp", "tp"), ())
    assert operator("norm", {"in": [[4, 1]]}, dp=2).input == (("dp", "tp"), ())


def test_exact_names_beat_globs_and_later_globs_beat_earlier():
    config = {"up": {"weight": ["tp", None]}, "*": {"input": [None]}, "u*": {"weight": [None, "tp"]}}
    found, problems = resolve(config, model(), grid())
    assert problems == []
    assert {o.module: o.key for o in found} == {m: "up" if m == "up" else "*" for m in (*KINDS, "other")}


def test_only_what_is_cut_is_a_split_and_a_tied_tensor_is_cut_alike_under_both_names():
    config = {"embed": {"weight": ["tp", None]}, "head": {"weight": ["tp", None]}, "norm": {"input": [None, None]}}
    found, problems = resolve(config, model(tied=True), grid())
    assert problems == []
    assert splits(found) == {"embed.weight": (("tp",), ()), "head.weight": (("tp",), ())}


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such module": (
        {"hed": {"weight": ["tp", None]}}, {},
        "parallel.operators.hed: no module has this name; modules are embed, up, norm, act, head, other "
        "(try: '~parallel.operators.hed')",
    ),
    "no strategy": (
        {"up": 3}, {},
        "parallel.operators.up: 3: not a strategy such as {weight: [tp, null]} or {in: [[1, 2], [2, 1]]}",
    ),
    "no such key": (
        {"up": {"wait": [1]}}, {},
        "parallel.operators.up: wait: no such key; the keys are input, output, in, out, layout and weight, bias",
    ),
    "no such axis": ({"up": {"weight": ["mp", None]}}, {},
                     "parallel.operators.up: weight: 'mp' is not an axis; the axes are dp, tp, or null"),
    "no axis has so many slices": (
        {"up": {"in": [[1, 1], [3, 1]]}}, {"dp": 4},
        "parallel.operators.up: in[weight]: 3 slices match no axis: tp is 2",
    ),
    "one axis on two dims": ({"up": {"weight": ["tp", "tp"]}}, {},
                             "parallel.operators.up: weight: ['tp', 'tp']: one axis cannot cut two dims"),
    "weights over dp": (
        {"up": {"weight": ["dp", None]}}, {},
        "parallel.operators.up: {weight: [dp, null]}: weight cannot be cut over dp here; parallel.hsdp shards weights "
        "over data-parallel ranks",
    ),
    "too many dims": ({"up": {"weight": ["tp", None, None]}}, {},
                      "parallel.operators.up: {weight: [tp, null, null]}: weight has shape [12, 6], not 3 dims"),
    "a norm has no part of its weight": (
        {"norm": {"weight": ["tp"]}}, {},
        "parallel.operators.norm: {weight: [tp]}: weight is cut over tp, but only input and output of a norm can be "
        "cut",
    ),
    "inputs that the weight does not fit, in either order": (
        {"up": {"in": [[1, 2], [1, 1]]}}, {},
        "parallel.operators.up: no way to read it fits the module: {weight: [null, null], input: [null, tp]}: input "
        "[null, tp] is cut over tp on its features, so the weight must be cut on its inputs",
    ),
    "samples over dp or tp": (
        {"norm": {"in": [[2, 1]]}}, {"dp": 2},
        "parallel.operators.norm: can be read as {weight: [null], input: [dp, null]} or as {weight: [null], input: "
        "[tp, null]}; write one of them (try: 'parallel.operators.norm={weight: [null], input: [dp, null]}')",
    ),
    "a table that comes first or second": (
        {"embed": {"in": [[2, 1], [1, 1]]}}, {"dp": 2},
        "parallel.operators.embed: can be read as {weight: [null, null], input: [dp, null]} or as {weight: [tp, null], "
        "input: [null, null]}; write one of them "
        "(try: 'parallel.operators.embed={weight: [null, null], input: [dp, null]}')",
    ),
    "indivisible": (
        {"up": {"weight": [None, "tp"]}}, {"tp": 4},
        "parallel.grid.tp: up.weight has 6 on dim 1, which is not divisible by tp=4 (try: parallel.grid.tp=3)",
    ),
    "one end of a tie": (
        {"head": {"weight": ["tp", None]}}, {"tied": True},
        "parallel.operators: head.weight is the same tensor as embed.weight, but it is cut [tp, null], and "
        "embed.weight is cut [null, null] (try: 'parallel.operators.embed.weight=[tp, null]')",
    ),
    "a bias of its own mind": (
        {"up": {"weight": ["tp", None], "bias": [None]}}, {},
        "parallel.operators.up: {weight: [tp, null], bias: [null]}: bias [null] does not fit weight [tp, null]",
    ),
    "a device matrix of other ranks": (
        {"up": {"layout": {"device_matrix": [2, 4], "alias_name": ["a", "b"]}, "weight": ["b", None]}}, {},
        "parallel.operators.up: layout.device_matrix: [2, 4]: a stage has dp 1 x tp 2 ranks",
    ),
    "a device axis across both": (
        {"up": {"layout": {"device_matrix": [2, 4], "alias_name": ["a", "b"]}, "weight": ["b", None]}}, {"dp": 4},
        "parallel.operators.up: layout: a (2 ranks, 4 apart) is neither dp (4 ranks, 2 apart) nor tp (2 ranks, 1 "
        "apart); layout: b (4 ranks, 1 apart) is neither dp (4 ranks, 2 apart) nor tp (2 ranks, 1 apart)",
    ),
    "a layout of another form": (
        {"up": {"layout": [2, 2], "weight": ["b", None]}}, {},
        "parallel.operators.up: layout: [2, 2]: must have the form layout: {device_matrix: [2, 2], alias_name: "
        "[dp, tp]}",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "where", "text"), list(BAD.values()), ids=list(BAD))
def test_a_strategy_that_cannot_be_is_refused_with_its_readings(config, where, text):
    assert wrong(config, **where) == [text]


def test_a_glob_over_many_layers_is_wrong_once():
    assert len(wrong({"[eu]*": {"weight": ["dp", None]}})) == 1
