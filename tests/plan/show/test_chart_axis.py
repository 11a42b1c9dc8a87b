from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.show import chart_axis


@given(st.floats(1e-12, 1e12))
def test_ticks_are_few_round_numbers_from_zero_to_the_end(most: float) -> None:
    found = chart_axis.ticks(most)
    assert found[0] == 0
    assert 2 < len(found) <= chart_axis.MOST + 1
    assert most * 0.5 < found[-1] <= most * 1.000001
    assert f"{found[1]:e}"[0] in "125"


@pytest.mark.parametrize(
    ("whole", "title", "last"),
    [(5.3, "seconds", "5"), (0.0053, "milliseconds", "5"), (5e-5, "microseconds", "50"), (0.0, "microseconds", "0")],
)  # fmt: skip
def test_seconds_have_the_largest_unit_of_which_there_is_one(whole: float, title: str, last: str) -> None:
    found = chart_axis.seconds(whole)
    assert (found.title, found.ticks[-1][1]) == (title, last)
    assert found.ticks[0] == (0, "0")


def test_shares_are_tenths() -> None:
    assert chart_axis.shares().ticks[3] == (0.3, "30 %")
