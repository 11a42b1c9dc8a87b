from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.checkpoint import Entry, Strategy, single
from launcher.checkpoint.layout.strategy import match
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.saving import sharded, small

GRID = Grid.of(pp=2, dp_shard=2)


def one(layout: Layout, dtype: str = "float32", kind: Any = "param", aliases: tuple[str, ...] = ()) -> Strategy:
    return Strategy(GRID, {"w": Entry(layout, dtype, kind, aliases)})


FLAWS: dict[str, tuple[Any, str]] = {
    "axis": (lambda: one(Layout(GRID, (4,), (("tp",),))), "w: axis tp is not in the grid {'pp': 2, 'dp_shard': 2}"),
    "twice": (
        lambda: one(Layout(GRID, (4, 4), (("dp_shard",), ("dp_shard",)))),
        "w: axis dp_shard cuts it and is used twice",
    ),
    "cut and pinned": (
        lambda: one(Layout(GRID, (4,), (("pp",),), (("pp", (0,)),))), "w: axis pp cuts it and is used twice"
    ),
    "coordinate": (
        lambda: one(sharded(GRID, (4,), 2)), "w: at pp [2]: it needs coordinates, in ascending order and below 2"
    ),
    "dtype": (
        lambda: one(sharded(GRID, (4,), 1), "float31"),
        "w: dtype float31 is unknown; supported dtypes: float64, int64, complex64, float32, int32, float16, bfloat16, "
        "int16, float8_e4m3fn, float8_e5m2, int8, uint8, bool, uint16, uint32, uint64",
    ),
    "kind": (lambda: one(sharded(GRID, (4,), 1), kind="weight"), "w: kind weight is not one of param, buffer, optim"),
    "names": (lambda: one(sharded(GRID, (4,), 1), aliases=("w",)), "w: two tensors have this name"),
    "grid": (
        lambda: one(sharded(Grid.of(dp_shard=2, pp=2), (4,), 1)),
        "w: its grid {'dp_shard': 2, 'pp': 2} has other ranks or stages than the strategy's grid "
        "{'pp': 2, 'dp_shard': 2}",
    ),
    "ranks": (
        lambda: one(sharded(Grid.of(pp=2, dp_shard=4), (4,), 1)),
        "w: its grid {'pp': 2, 'dp_shard': 4} has other ranks or stages than the strategy's grid "
        "{'pp': 2, 'dp_shard': 2}",
    ),
    "own axes": (
        lambda: one(Layout(Grid.of(pp=2, x=2), (4,), (("dp_shard",),))),
        "w: axis dp_shard is not in the grid {'pp': 2, 'x': 2}",
    ),
    "own grid": (
        lambda: one(Layout(Grid((("pp", 2), ("x", 2), ("x", 1))), (4,), ((),))),
        "w: grid {'pp': 2, 'x': 1}: axes need different names and sizes of at least 1",
    ),
    "size": (
        lambda: Strategy(Grid.of(pp=0), {}), "grid {'pp': 0}: axes need different names and sizes of at least 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "text"), FLAWS.values(), ids=FLAWS.keys())
def test_a_strategy_that_cannot_be_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    assert str(caught.value) == text


def test_strategies_of_different_tensors_are_told_apart_name_by_name() -> None:
    src = small()
    entries = dict(src.entries)
    del entries["layer.mean"]
    entries["new"] = replace(entries.pop("optim.step"), kind="param")
    entries["layer.weight"] = replace(entries["layer.weight"], dtype="float32")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        match(src, Strategy(src.grid, entries))
    assert str(caught.value) == (
        "the strategies do not match:\n"
        "  layer.weight: bfloat16 in the source, float32 in the destination; dtypes cannot be changed here\n"
        "  only in the source: layer.mean, optim.step\n"
        "  only in the destination: new"
    )


def test_two_tensors_do_not_become_one_tied_tensor() -> None:
    src = small()
    entries = dict(src.entries)
    untied = Strategy(src.grid, entries | {"embed.weight": replace(entries["embed.weight"], aliases=()),
                                           "head.weight": replace(entries["embed.weight"], aliases=())})  # fmt: skip
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        match(untied, src)
    assert str(caught.value) == (
        "the strategies do not match:\n"
        "  embed.weight: one tied tensor in the destination, but 2 tensors in the source: embed.weight, head.weight"
    )
    assert match(src, untied)["head.weight"] == "embed.weight"


def test_shapes_that_differ_are_named() -> None:
    src, dst = one(sharded(GRID, (4,), 1)), one(sharded(GRID, (5,), 1))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        match(src, dst)
    assert str(caught.value) == "the strategies do not match:\n  w: shape [4] in the source, [5] in the destination"


def test_single_puts_every_full_tensor_on_one_rank() -> None:
    got = single(small())
    assert got.grid.size == 1
    assert {n: e.layout.axes for n, e in got.entries.items()} == dict.fromkeys(small().entries, ())
    assert {n: e.spec for n, e in got.entries.items()} == {n: e.spec for n, e in small().entries.items()}
