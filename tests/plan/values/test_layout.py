from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, BoxCopy, Layout, moves


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    names = draw(st.permutations("abc"))[: draw(st.integers(1, 3))]
    return Grid(tuple((name, draw(st.integers(1, 4))) for name in names))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Layout:
    grid = draw(grids())
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    split: list[list[str]] = [[] for _ in shape]
    at = []
    for axis, n in draw(st.permutations(grid.axes)):
        use = draw(st.sampled_from(["copy", "pin", *range(len(shape))]))
        if use == "pin":
            at.append((axis, tuple(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1))))))
        elif isinstance(use, int):
            split[use].append(axis)
    return Layout(grid, shape, tuple(map(tuple, split)), tuple(at))


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.lo, box.hi, strict=True))))


@given(layouts())
@settings(max_examples=300)
def test_the_boxes_of_a_layout_tile_the_tensor(layout: Layout) -> None:
    seen = [cell for box in layout.holders() for cell in cells(box)]
    assert sorted(seen) == sorted(cells(Box((0,) * len(layout.shape), layout.shape)))


@given(layouts())
@settings(max_examples=200)
def test_holders_are_exactly_the_ranks_with_that_box(layout: Layout) -> None:
    for box, ranks in layout.holders().items():
        assert list(ranks) == [r for r in range(layout.grid.size) if layout.box(r) == box]


@given(layouts())
def test_a_rank_has_a_box_where_the_layout_says_it_holds_the_tensor(layout: Layout) -> None:
    held = [rank for rank in range(layout.grid.size) if layout.box(rank) is not None]
    assert held == [rank for rank in range(layout.grid.size) if layout.holds(rank)]
    assert held


@given(st.data())
@settings(max_examples=300)
def test_moves_rebuild_every_piece_from_ranks_that_hold_it(data: st.DataObject) -> None:
    src = data.draw(layouts())
    dst = data.draw(layouts(src.shape))
    for rank in range(dst.grid.size):
        got = moves(src, dst, rank)
        want = dst.box(rank)
        if want is None:
            assert got == ()
            continue
        filled = [cell for move in got for cell in cells(move.box)]
        assert sorted(filled) == sorted(cells(want))
        for move in got:
            box = src.box(move.src)
            assert move.dst == rank
            assert box is not None
            assert cells(move.box) <= cells(box)


@pytest.mark.parametrize(
    ("rank", "box"),
    [(0, Box((0,), (2,))), (1, Box((2,), (4,))), (2, Box((4,), (5,))), (3, Box((5,), (5,)))],
)
def test_ragged_dims_are_cut_as_torch_chunk_cuts_them(rank: int, box: Box) -> None:
    assert Layout(Grid.of(a=4), (5,), (("a",),)).box(rank) == box


def test_the_first_axis_of_a_dim_is_the_outermost_whatever_its_place_in_the_grid() -> None:
    layout = Layout(Grid.of(a=2, b=2), (8,), (("b", "a"),))
    assert [layout.box(rank) for rank in range(4)] == [Box((n,), (n + 2,)) for n in (0, 4, 2, 6)]


def test_a_rank_reads_its_own_copy_before_the_lowest_one() -> None:
    grid = Grid.of(a=3)
    layout = Layout(grid, (2,), ((),))
    assert moves(layout, layout, 2) == (BoxCopy(2, 2, Box((0,), (2,))),)
    assert moves(Layout(grid, (2,), ((),), (("a", (0, 1)),)), layout, 2) == (BoxCopy(0, 2, Box((0,), (2,))),)


def test_a_box_within_another_counts_from_its_corner() -> None:
    assert Box((3, 4), (5, 6)).within(Box((2, 4), (9, 9))) == Box((1, 0), (3, 2))


def test_a_tensor_of_no_dims_is_one_box() -> None:
    assert Layout(Grid.of(a=2), (), ()).holders() == {Box((), ()): (0, 1)}
