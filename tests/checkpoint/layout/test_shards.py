from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint.layout.shards import full_box, overlapping_shards, saved, saved_shards, slabs
from launcher.plan.values.layout import Box
from tests.checkpoint.saving import grids, layouts

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def cells(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(a, b) for a, b in zip(box.lo, box.hi, strict=True))))


@given(st.data(), shapes)
@settings(max_examples=300)
def test_a_piece_is_saved_by_the_lowest_of_its_holders_only(data: st.DataObject, shape: tuple[int, ...]) -> None:
    layout = data.draw(layouts(data.draw(grids()), shape))
    lowest = {(ranks[0], box) for box, ranks in layout.holders().items()}
    if 0 in shape:  # no elements: one copy is enough, whatever the boxes are
        lowest = {min(lowest)}
    assert {(p.rank, p.box) for p in saved_shards(layout)} == lowest
    assert {(r, b) for r in range(layout.grid.size) if (b := saved(layout, r)) is not None} == lowest


@given(st.data(), shapes)
@settings(max_examples=200)
def test_parts_cover_a_box_once(data: st.DataObject, shape: tuple[int, ...]) -> None:
    layout = data.draw(layouts(data.draw(grids()), shape))
    ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    want = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
    got = [cell for _, both in overlapping_shards(layout, want) for cell in cells(both)]
    assert sorted(got) == cells(want)


@given(shapes, st.sampled_from([1, 2, 8]), st.integers(8, 200))
def test_slabs_are_a_box_in_order_within_the_limit(shape: tuple[int, ...], itemsize: int, limit: int) -> None:
    box = full_box(shape)
    got = list(slabs(box, itemsize, limit))
    assert [cell for slab in got for cell in cells(slab)] == cells(box)
    assert all(prod(slab.shape) * itemsize <= limit for slab in got)
