from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint import Strategy
from launcher.extras.mindspore.merge_strategies import merge
from launcher.extras.mindspore.strategy import OperatorParts, Slicing, StrategyFile
from launcher.extras.mindspore.strategy_file import parse, strategy_text
from launcher.extras.mindspore.to_ours import full_specs, to_strategy
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box
from launcher.plan.values.tensor_spec import TensorSpec
from tests.extras.mindspore.truth import exactly, index


def file_of(layouts: dict[str, Slicing], stage: int = 0) -> StrategyFile:
    return StrategyFile(2, (OperatorParts("op", stage),), layouts)


def box_of(slices: tuple[slice, ...]) -> Box:
    return Box(tuple(s.start for s in slices), tuple(s.stop for s in slices))


def as_data(s: Slicing) -> dict[str, Any]:
    """Return the layout in the terms of the independent slicer."""
    sizes = {"opt_weight_shard_size": s.shard_size, "opt_weight_shard_step": s.shard_step}
    return {"dev_matrix": s.devices, "tensor_map": [list(d) or [-1] for d in s.dims]} | sizes


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def matrices(draw: st.DrawFn, ranks: int) -> tuple[int, ...]:
    out: list[int] = []
    while ranks > 1 and len(out) < 4:
        out.append(draw(st.sampled_from(divisors(ranks)[1:])))
        ranks //= out[-1]
    out = [*out, ranks] if ranks > 1 or not out else out
    return tuple(draw(st.permutations(out)))


@st.composite
def slicings(draw: st.DrawFn, ranks: int) -> tuple[Slicing, tuple[int, ...]]:
    """Draw a layout, and the shape of a full tensor that it splits evenly."""
    devices = draw(matrices(ranks))
    rank = draw(st.integers(0, 3))
    axes = draw(st.permutations(range(len(devices))))
    homes = [draw(st.integers(0, rank)) for _ in axes]  # the last home stands for repeats
    dims = tuple(tuple(a for a, home in zip(axes, homes, strict=True) if home == d) for d in range(rank))
    plain = Slicing(devices, dims, nested=True)
    size = draw(st.sampled_from([0, -1, *divisors(plain.repeats)]))
    s = replace(plain, shard_size=size, shard_step=1 if size else 0)
    parts = [s.count(d) * (s.shards if d == 0 else 1) for d in range(rank)]
    return s, tuple(n * draw(st.integers(1, 2)) for n in parts)


@settings(deadline=None)
@given(st.data(), st.sampled_from([1, 2, 8, 16]), st.integers(1, 2))
def test_every_box_is_where_the_ranks_of_the_device_matrices_say(data: st.DataObject, ranks: int, stages: int) -> None:
    drawn = {f"{s}.{i}": data.draw(slicings(ranks)) for s in range(stages) for i in range(3)}
    parts = [(f"{s}", file_of({n: x for n, (x, _) in drawn.items() if n[0] == str(s)}, s)) for s in range(stages)]
    file = merge(parts)
    assert parse(strategy_text(file, "protobuf"), "again") == replace(
        file, layouts={n: same(s) for n, s in file.layouts.items()}
    )
    full = {n: TensorSpec(shape, "bfloat16") for n, (_, shape) in drawn.items()}
    strategy = to_strategy(file, full)
    assert strategy.grid.axes[0] == ("pp", stages)
    assert strategy.grid.size == ranks * stages
    for name, (slicing, shape) in drawn.items():
        layout = strategy.entries[name].layout
        for rank in range(strategy.grid.size):
            mine = rank // ranks == int(name[0])
            want = box_of(index(as_data(slicing), shape, rank % ranks)) if mine else None
            assert layout.box(rank) == want
        piece = TensorSpec(layout.box(int(name[0]) * ranks).shape, "bfloat16")  # type: ignore[union-attr]
        assert full_specs(file_of({name: slicing}), {name: piece}) == {name: full[name]}


def same(s: Slicing) -> Slicing:
    """Return the slicing as it is read: a tensor without dims is not nested."""
    return s if s.dims else replace(s, nested=False)


@settings(deadline=None)
@given(st.data(), st.sampled_from([6, 12]))
def test_device_matrices_that_share_no_grid_are_refused_not_guessed(data: st.DataObject, ranks: int) -> None:
    drawn = {f"p{i}": data.draw(slicings(ranks)) for i in range(2)}
    file = file_of({n: s for n, (s, _) in drawn.items()})
    full = {n: TensorSpec(shape, "float32") for n, (_, shape) in drawn.items()}
    try:
        strategy = to_strategy(file, full)
    except ValueError as error:
        if "has axes for both" in str(error) or "one size must divide the other" in str(error):
            return
        raise
    for name, (slicing, shape) in drawn.items():
        found = [strategy.entries[name].layout.box(rank) for rank in range(ranks)]
        assert found == [box_of(index(as_data(slicing), shape, rank)) for rank in range(ranks)]


def boxes(strategy: Strategy) -> dict[str, list[Box | None]]:
    return {n: [e.layout.box(r) for r in range(strategy.grid.size)] for n, e in strategy.entries.items()}


def test_a_tied_tensor_is_one_entry_at_every_stage_that_lists_it() -> None:
    tied = Slicing((2,), ((0,), ()))
    file = merge([(f"s{i}", file_of({"emb": tied, f"own{i}": tied}, i)) for i in range(3)])
    file = replace(file, layouts={n: s for n, s in file.layouts.items() if n != "1-emb"})
    strategy = to_strategy(file, {n: TensorSpec((4, 4), "float32") for n in ("emb", "own0", "own1", "own2")})
    assert strategy.entries["emb"].layout.at == (("pp", (0, 2)),)


def test_one_device_a_stage_needs_no_axis_but_the_stages() -> None:
    whole = Slicing((1,), ((0,), ()))
    file = merge([("a", file_of({"x": whole}, 0)), ("b", file_of({"y": Slicing((1,), ())}, 1))])
    strategy = to_strategy(file, {"x": TensorSpec((4, 4), "float32"), "y": TensorSpec((), "float32")})
    assert strategy.grid.axes == (("pp", 2),)
    assert boxes(strategy) == {"x": [Box((0, 0), (4, 4)), None], "y": [None, Box((), ())]}


def test_json_that_has_a_dim_for_each_axis_is_read_as_the_real_dims() -> None:
    expanded = Slicing((2, 2, 2), ((), (1,), (0,)), shape=(16, 2, 16))
    vector = Slicing((2, 2, 2), ((1,), (0,)), shape=(2, 16))
    file = parse(strategy_text(file_of({"w": expanded, "b": vector}), "json"), "f.json")
    full = full_specs(file, {"w": TensorSpec((16, 8), "float32"), "b": TensorSpec((8,), "float32")})
    assert full == {"w": TensorSpec((16, 32), "float32"), "b": TensorSpec((32,), "float32")}
    strategy = to_strategy(file, full)
    for name, dims in (("w", ((), (1, 0))), ("b", ((1, 0),))):
        data, shape = as_data(Slicing((2, 2, 2), dims)), full[name].shape
        found = [strategy.entries[name].layout.box(rank) for rank in range(8)]
        assert found == [box_of(index(data, shape, rank)) for rank in range(8)]


W = TensorSpec((8, 6), "float32")
ROWS = Slicing((4,), ((0,), ()))
UNFIT = "the strategy file does not fit:\n"


@pytest.mark.parametrize(
    ("layouts", "full", "message"),
    [
        ({"w": ROWS, "v": ROWS}, {"w": W}, UNFIT + "  v: in the strategy, but not in the checkpoint"),
        (
            {"w": Slicing((4,), ((), (0,)))},
            {"w": W},
            UNFIT + "  w: dim 1 of float32[8, 6] does not divide into 4 parts",
        ),
        (
            {"w": replace(ROWS, shape=(8, 8))},
            {"w": W},
            UNFIT + "  w: the tensor is float32[8, 6], the strategy says [8, 8]",
        ),
        (
            {"w": Slicing((4,), ((0,), (), ()))},
            {"w": W},
            UNFIT + "  w: the strategy has 3 dims, the tensor [8, 6] has 2, and they do not match",
        ),
        (
            {"w": replace(ROWS, field=3)},
            {"w": W},
            UNFIT + "  w: it is split by hand (field or param_split_shape), which is not supported",
        ),
        (
            {"w": ROWS, "v": Slicing((8,), ((0,), ()))},
            {"w": W, "v": W},
            "device matrices of different sizes: 4 for w, 8 for v; all stages must have the same number of ranks",
        ),
        (
            {"w": Slicing((3, 2, 4), ((1,),), shard_size=6, shard_step=2)},
            {"w": TensorSpec((24,), "float32")},
            UNFIT + "  w: optimizer sharding over 6 ranks does not fit the axes [3, 4] that cut no dim; "
            "one size must divide the other",
        ),
    ],
)
def test_layouts_that_do_not_fit_the_tensors_are_named(
    layouts: dict[str, Slicing], full: dict[str, TensorSpec], message: str
) -> None:
    with pytest.raises(ValueError, match=exactly(message)):
        to_strategy(file_of(layouts), full)


def test_device_matrices_without_common_axes_stay_those_of_their_parameters() -> None:
    full = dict.fromkeys("wvu", TensorSpec((6, 6), "float32"))
    layouts = {"w": Slicing((2, 3), ((1,), ())), "v": Slicing((3, 2), ((0, 1), ())), "u": Slicing((6,), ((), (0,)))}
    strategy = to_strategy(file_of(layouts), full)
    assert strategy.grid == Grid.of(pp=1, d0=6)
    assert {n: e.layout.grid for n, e in strategy.entries.items()} == {
        "w": Grid.of(pp=1, d0=2, d1=3), "v": Grid.of(pp=1, d0=3, d1=2), "u": Grid.of(pp=1, d0=6)
    }  # fmt: skip
    for name, slicing in layouts.items():
        found = [strategy.entries[name].layout.box(rank) for rank in range(6)]
        assert found == [box_of(index(as_data(slicing), (6, 6), rank)) for rank in range(6)]


def test_a_tie_that_two_stages_cut_differently_is_named() -> None:
    file = merge([("a", file_of({"w": ROWS}, 0)), ("b", file_of({"w": Slicing((4,), ((), (0,)))}, 1))])
    told = "  w: stage 1 cuts it differently from an earlier stage; a tensor must have one layout"
    with pytest.raises(ValueError, match=exactly(UNFIT + told)):
        to_strategy(file, {"w": TensorSpec((4, 4), "float32")})


def test_a_slice_that_contradicts_the_shape_in_the_file_is_named() -> None:
    told = (
        "slices of float32[4, 6] make [16, 6], but the strategy has [8, 6]; give the files and the strategy of one save"
    )
    with pytest.raises(ValueError, match=exactly(UNFIT + f"  w: {told}")):
        full_specs(file_of({"w": replace(ROWS, shape=(8, 6))}), {"w": TensorSpec((4, 6), "float32")})


def test_a_pipeline_with_too_few_stages_is_refused() -> None:
    text = "  the strategy has stage 2, but the pipeline has only 2 stages, 0 to 1"
    with pytest.raises(ValueError, match=exactly(UNFIT + text)):
        to_strategy(file_of({"w": ROWS}, 2), {"w": W}, stages=2)
