from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint import Entry, Strategy
from launcher.extras.mindspore.from_ours import stage_files
from launcher.extras.mindspore.merge_strategies import merged_file
from launcher.extras.mindspore.strategy import OperatorParts, Slicing, StrategyFile
from launcher.extras.mindspore.strategy_file import parse, read_strategy, strategy_text
from launcher.extras.mindspore.to_ours import to_strategy
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, Layout
from launcher.plan.values.tensor_spec import TensorSpec
from tests.checkpoint.saving import matrices
from tests.extras.mindspore.truth import FIXTURES, exactly

GRID = Grid.of(pp=2, dp_replicate=2, dp_shard=2, tp=2)


@st.composite
def ours(draw: st.DrawFn) -> Strategy:
    """Draw any even layout over stages, with ties between stages.

    The layout is over one grid, or each tensor is over a device matrix.
    """
    grid = draw(st.sampled_from([GRID, Grid.of(pp=2, dp=12)]))
    entries = {}
    for i in range(draw(st.integers(1, 4))):
        over = draw(matrices(grid)) if grid != GRID else grid
        rank = draw(st.integers(0, 3))
        axes = draw(st.permutations([axis for axis, _ in over.axes if axis != "pp"]))
        homes = [draw(st.integers(0, rank)) for _ in axes]
        split = tuple(tuple(a for a, home in zip(axes, homes, strict=True) if home == d) for d in range(rank))
        shape = tuple(draw(st.integers(0, 2)) * prod(over[a] for a in dim) for dim in split)
        where = draw(st.sampled_from([(0,), (1,), (0, 1)]))
        at = (("pp", where),) if len(where) < 2 else ()
        entries[f"a-b.{i}"] = Entry(Layout(over, shape, split, at), "float16")
    return Strategy(grid, entries)


def boxes(strategy: Strategy) -> dict[str, list[Box | None]]:
    return {n: [e.layout.box(r) for r in range(strategy.grid.size)] for n, e in strategy.entries.items()}


@settings(deadline=None)
@given(ours())
def test_our_strategies_keep_every_box_through_mindspores_form(strategy: Strategy) -> None:
    full = {n: e.spec for n, e in strategy.entries.items()}
    file = parse(strategy_text(merged_file(strategy), "protobuf"), "again")
    assert boxes(to_strategy(file, full, stages=2)) == boxes(strategy)
    file = parse(strategy_text(merged_file(strategy), "json"), "again")
    assert boxes(to_strategy(file, full, stages=2)) == boxes(strategy)


def test_sharding_of_the_repeats_is_written_as_mindspore_writes_it() -> None:
    layout = Layout(GRID, (16, 8), (("tp", "dp_shard"), ()), (("pp", (1,)),))
    first, second = stage_files(Strategy(GRID, {"w": Entry(layout, "float32")}))
    assert first == StrategyFile(2, (OperatorParts("Stage", 0),), {})
    want = Slicing((2, 2, 2), ((0,), ()), shard_size=2, shard_step=2, shape=(16, 8))
    assert second == StrategyFile(2, (OperatorParts("Parameter_w", 1),), {"w": want})


SHAPES = {"net.layers.0.weight": (16, 32), "net.layers.1.weight": (32, 16), "net.layers.0.bias": (32,)}


@pytest.mark.parametrize(
    ("name", "axes"), [("dp2tp4_opt", {"d0": 2, "d1": 4}), ("dp4tp2_opt2", {"d0": 2, "d1": 2, "d2": 2})]
)
def test_real_files_of_optimizer_sharding_come_out_again_as_they_were(name: str, axes: dict[str, int]) -> None:
    file = read_strategy(FIXTURES / "real_strategy" / f"{name}_strategy_rank0.ckpt")
    full = {n: TensorSpec(next(s for p, s in SHAPES.items() if n.endswith(p)), "float32") for n in file.layouts}
    strategy = to_strategy(file, full)
    assert strategy.grid.axes == (("pp", 1), *axes.items())
    assert {n for n, e in strategy.entries.items() if e.kind == "param"} == SHAPES.keys()
    assert {n for n, e in strategy.entries.items() if e.kind == "optim"} == file.layouts.keys() - SHAPES.keys()
    cut = {n: s for n, s in merged_file(strategy).layouts.items() if file.layouts[n].dims[0]}
    assert len(cut) == 6  # if nothing else splits dim 0, sharding is one axis on it and needs no extra fields
    for n, slicing in cut.items():
        assert (slicing.dims, slicing.shards) == (file.layouts[n].dims, file.layouts[n].shards)
        assert slicing.shard_step == file.layouts[n].shard_step


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (Layout(GRID, (5, 4), (("tp",), ())), "ragged: dim 0 of [5, 4] does not divide into 2 parts"),
        (Layout(GRID, (4,), ((),), (("tp", (0,)),)), "only some coordinates of axis tp hold it"),
        (Layout(GRID, (4,), (("pp",),)), "its slices are on several stages (axis pp)"),
    ],
)
def test_a_layout_that_mindspore_cannot_have_is_refused(layout: Layout, told: str) -> None:
    with pytest.raises(ValueError, match=exactly(f"MindSpore has no such layout:\n  w: {told}")):
        stage_files(Strategy(GRID, {"w": Entry(layout, "float32")}))


def test_a_grid_whose_stages_are_not_outermost_is_refused() -> None:
    grid = Grid.of(dp_shard=2, pp=2)
    with pytest.raises(
        ValueError,
        match=exactly("grid {'dp_shard': 2, 'pp': 2}: MindSpore requires the stages to be the outermost axis (pp)"),
    ):
        stage_files(Strategy(grid, {"w": Entry(Layout(grid, (4,), ((),)), "float32")}))
