"""Layouts of parameters from a file are reached by splitting the operators that own them, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.tensor_parallel.strategies_of_layouts import ParamLayouts, degree, on_grid, resolved
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from launcher.plan.values.model_graph import ModelStructure, Param
from tests.checkpoint.saving import matrices
from tests.plan.made import spec

KINDS = {"embed": "embedding", "up": "linear", "norm": "norm", "head": "linear"}
SHAPES = {"embed.weight": (8, 8), "up.weight": (8, 8), "up.bias": (8,), "norm.weight": (8,), "head.weight": (8, 8)}
GRID = Grid.of(pp=1, dp_replicate=1, dp_shard=2, tp=2)
OWN = Grid.of(pp=1, x=2, y=2)
WHOLE: dict[str, tuple[tuple[str, ...], ...]] = {n: ((),) * len(shape) for n, shape in SHAPES.items()}
LOAD = "parallel.param_strategy.load"


def model(tied: bool = False) -> ModelStructure:
    same = {"head.weight": "embed.weight"} if tied else {}
    params = tuple(Param(n, spec(*shape), same.get(n, n)) for n, shape in SHAPES.items())
    return ModelStructure(tuple(KINDS), params, frozenset(), tuple(KINDS.items()))


def file(grid: Grid = GRID, **splits: tuple[tuple[str, ...], ...]) -> ParamLayouts:
    """Return layouts with these splits, where ``up_weight`` stands for ``up.weight``; the others are not split."""
    every = WHOLE | {name.replace("_", "."): split for name, split in splits.items()}
    return ParamLayouts("p.json", {n: Layout(grid, SHAPES[n], split) for n, split in every.items()})


def cuts(given: ParamLayouts, config: dict[str, Any] | None = None, tied: bool = False) -> dict[str, str]:
    found, problems = resolved(config or {}, model(tied), GRID, given)
    assert problems == []
    return {o.module: o.mode for o in found}


def refused(given: ParamLayouts, config: dict[str, Any] | None = None, tied: bool = False) -> list[str]:
    _, problems = resolved(config or {}, model(tied), GRID, given)
    return [str(p) for p in problems]


def test_operators_follow_the_layouts_of_their_weights() -> None:
    given = file(
        embed_weight=(("tp",), ()), up_weight=(("tp", "dp_shard"), ()), up_bias=(("tp",),), head_weight=((), ("tp",))
    )
    assert cuts(given) == {"embed": "vocabulary", "up": "column", "head": "row"}


def test_names_and_number_of_axes_do_not_matter() -> None:
    given = file(OWN, embed_weight=((), ("y",)), up_weight=(("y", "x"), ()), up_bias=(("y",),), norm_weight=(("x",),))
    assert cuts(given) == {"embed": "hidden", "up": "column"}


def test_one_name_of_a_tied_tensor_cuts_both_operators() -> None:
    given = file(embed_weight=(("tp",), ()))
    given = replace(given, layouts={n: lay for n, lay in given.layouts.items() if n != "head.weight"})
    assert cuts(given, tied=True) == {"embed": "vocabulary", "head": "column"}


def test_operators_of_the_request_keep_what_they_add_to_the_layouts() -> None:
    given = file(up_weight=((), ("tp",)))
    config = {"u*": {"weight": [None, "tp"], "output": [None, "tp", None]}, "norm": {"input": [None, "tp", None]}}
    found, problems = resolved(config, model(), GRID, given)
    assert problems == []
    assert {o.module: o.output for o in found} == {"up": ((), ("tp",), ()), "norm": None}


HAD = "which does not fit pp 1 x dp_replicate 1 x dp_shard 2 x tp 2: tp can cut one dim, and then dp_shard dim 0"
REFUSED: dict[str, tuple[ParamLayouts, dict[str, Any], list[str]]] = {
    "two ways": (
        file(up_weight=(("tp",), ()), up_bias=(("tp",),)),
        {"up": {"weight": [None, "tp"]}},
        [
            f"parallel.operators.up: up.weight has two layouts: [null, tp] here, [tp, null] in p.json ({LOAD}) "
            "(try: '~parallel.operators.up')"
        ],
    ),
    "cut here and whole there": (
        file(),
        {"u*": {"weight": [None, "tp"]}},
        [
            f"parallel.operators.u*: up.weight has two layouts: [null, tp] here, [null, null] in p.json ({LOAD}) "
            "(try: '~parallel.operators.u*')"
        ],
    ),
    "dp first": (
        file(up_weight=(("dp_shard", "tp"), ())),
        {},
        [f"{LOAD}: p.json: up.weight is cut [4, whole] (ranks [1] apart), {HAD}"],
    ),
    "dp on dim 1": (
        file(up_weight=((), ("dp_shard",))),
        {},
        [f"{LOAD}: p.json: up.weight is cut [whole, 2] (ranks [2] apart), {HAD}"],
    ),
    "a norm": (
        file(norm_weight=(("tp",),)),
        {},
        [
            f"{LOAD}: p.json: norm: {{weight: [tp]}}: weight is cut over tp, but only input and output of a norm can "
            "be cut"
        ],
    ),
    "a bias by itself": (
        file(up_weight=((), ("tp",)), up_bias=(("tp",),)),
        {},
        [f"{LOAD}: p.json: up: {{weight: [null, tp], bias: [tp]}}: bias [tp] does not fit weight [null, tp]"],
    ),
}


@pytest.mark.parametrize(("given", "config", "told"), REFUSED.values(), ids=REFUSED)
def test_layouts_that_no_operators_give_are_refused_with_the_parameter(
    given: ParamLayouts, config: dict[str, Any], told: list[str]
) -> None:
    assert refused(given, config) == told


def test_one_tensor_is_not_cut_in_two_ways() -> None:
    given = file(embed_weight=(("tp",), ()), head_weight=((), ("tp",)))
    told = "head.weight is the same tensor as embed.weight, but is cut differently"
    assert refused(given, tied=True) == [f"{LOAD}: p.json: {told}"]


@pytest.mark.parametrize(("sharded", "want"), [(False, 2), (True, 1)])
def test_a_cut_of_dim_0_alone_is_of_operators_unless_ranks_share_weights(sharded: bool, want: int) -> None:
    assert degree([Layout(OWN, (8, 8), (("y",), ()))], sharded=sharded) == want


@given(st.data())
def test_a_layout_on_another_grid_has_the_same_boxes(data: st.DataObject) -> None:
    ranks = Grid.of(pp=2, all=data.draw(st.sampled_from([4, 6, 8, 12])))
    one, other = data.draw(matrices(ranks)), data.draw(matrices(ranks))
    axes = data.draw(st.permutations([axis for axis, _ in one.axes if axis != "pp"]))
    at = data.draw(st.integers(0, len(axes)))
    layout = Layout(one, (24, 24), (tuple(axes[:at]), tuple(axes[at : at + 1])))
    split = on_grid(layout, other)
    if split is not None:
        moved = Layout(other, (24, 24), split)
        assert [moved.box(r) for r in range(ranks.size)] == [layout.box(r) for r in range(ranks.size)]
    if one == other:
        assert split is not None
