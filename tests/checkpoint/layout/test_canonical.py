"""Layouts that are equal but written differently."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint.layout.strategy import meaning
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.saving import layouts


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_layouts_that_mean_the_same_have_the_same_boxes(data: st.DataObject) -> None:
    names = {"a": 2, "b": 2, "c": 3}
    grid, shape = Grid.of(pp=2, **names), tuple(data.draw(st.lists(st.sampled_from([0, 5, 12]), max_size=2)))
    one, other = (data.draw(layouts(Grid(tuple(data.draw(st.permutations(grid.axes)))), shape)) for _ in range(2))
    if meaning(one) == meaning(other):
        assert [one.box(r) for r in range(24)] == [other.box(r) for r in range(24)]
    joined = Layout(Grid.of(pp=2, ab=4, c=3), (12,), (("ab",),), (("pp", (1,)),))
    assert meaning(joined) == meaning(Layout(grid, (12,), (("a", "b"),), (("pp", (1,)),)))
    assert meaning(joined) != meaning(Layout(grid, (12,), (("b", "a"),), (("pp", (1,)),)))
