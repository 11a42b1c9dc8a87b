from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.values.grid import Grid

grids = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda ns: Grid(tuple(zip("abcd", ns, strict=False))))


@given(grids)
def test_coordinates_and_ranks_are_inverse(grid: Grid) -> None:
    assert [grid.rank(**grid.coords(rank)) for rank in range(grid.size)] == list(range(grid.size))


@given(grids)
def test_the_last_axis_runs_fastest(grid: Grid) -> None:
    axes = [axis for axis, _ in grid.axes]
    places = [tuple(grid.coords(rank)[axis] for axis in axes) for rank in range(grid.size)]
    assert places == sorted(places)


@given(grids, st.data())
def test_peers_share_every_other_coordinate_and_split_the_world(grid: Grid, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from([axis for axis, _ in grid.axes]), unique=True))
    groups = {grid.peers(rank, *axes) for rank in range(grid.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
    for group in groups:
        fixed = {axis: at for axis, at in grid.coords(group[0]).items() if axis not in axes}
        assert group == grid.ranks(**fixed)


@given(grids, st.data())
def test_ranks_are_those_whose_coordinates_agree(grid: Grid, data: st.DataObject) -> None:
    fixed = data.draw(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 4), max_size=3))
    assert grid.ranks(**fixed) == tuple(r for r in range(grid.size) if fixed.items() <= grid.coords(r).items())


@given(grids, st.data())
def test_alike_ranks_agree_on_the_axes_and_on_what_is_fixed(grid: Grid, data: st.DataObject) -> None:
    names = [axis for axis, _ in grid.axes]
    axes = data.draw(st.lists(st.sampled_from(names), max_size=3))
    fixed = {axis: data.draw(st.integers(0, grid[axis] - 1)) for axis in data.draw(st.sets(st.sampled_from(names)))}
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in grid.ranks(**fixed):
        found.setdefault(tuple(grid.coords(rank)[axis] for axis in axes), []).append(rank)
    assert set(grid.alike(*axes, **fixed)) == set(map(tuple, found.values()))


def test_no_axes_leave_one_rank_alone() -> None:
    assert Grid.of(a=2, b=3).peers(4) == (4,)
    assert Grid(()).size == 1
