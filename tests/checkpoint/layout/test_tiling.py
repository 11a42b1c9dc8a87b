from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.checkpoint.layout.shards import saved_shards, untiled
from launcher.plan.values.layout import Box
from tests.checkpoint.saving import grids, layouts

WRONG = {
    "a gap": ((4, 2), [Box((0, 0), (2, 2)), Box((3, 0), (4, 2))], "its pieces do not add up to [4, 2]"),
    "nothing": ((4,), [], "its pieces do not add up to [4]"),
    "twice": ((2, 2), [Box((0, 0), (2, 2)), Box((0, 1), (1, 2))], "its pieces at [0, 0] and [0, 1] overlap"),
    "as much as is missing": ((4,), [Box((0,), (2,)), Box((1,), (3,))], "its pieces at [0] and [1] overlap"),
    "outside": ((4,), [Box((2,), (6,))], "its piece from [2] to [6] lies outside [4]"),
    "a number twice": ((), [Box((), ()), Box((), ())], "its pieces at [] and [] overlap"),
}


@pytest.mark.parametrize("case", WRONG)
def test_boxes_that_do_not_tile_a_tensor_are_explained(case: str) -> None:
    shape, boxes, text = WRONG[case]
    assert untiled(shape, boxes) == text


@given(st.data())
def test_what_a_layout_saves_is_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    layout = data.draw(layouts(data.draw(grids()), shape))
    assert untiled(shape, [piece.box for piece in saved_shards(layout)]) is None


@given(st.data())
def test_it_agrees_with_counting(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    spans = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    boxes = [
        Box(tuple(a for a, _ in b), tuple(z for _, z in b)) for b in data.draw(st.lists(st.tuples(*spans), max_size=4))
    ]
    count = np.zeros(shape, int)
    for box in boxes:
        count[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))] += 1
    assert (untiled(shape, boxes) is None) == (int((count == 1).sum()) == prod(shape))
