"""Habits that are common in public code are planned, not refused, and exact."""

from __future__ import annotations

import pytest

from tests.parity import assert_parity, own

CUT = {"a": 0, "b": 1, "head": 1}
HABITS = [
    "NoAutocast", "NoAutocastOfDtype", "IndexedByLists", "GradOfBuffer", "Variables", "BetweenModules",
]  # fmt: skip


@pytest.mark.parametrize("net", HABITS)
def test_a_common_habit_is_exact_over_stages(net):
    assert_parity(own(f"habit_nets.{net}", [6], stages=CUT, train__batch_size=4), parts=2)


@pytest.mark.parametrize("net", HABITS)
def test_a_common_habit_is_exact_on_one_rank(net):
    assert_parity(own(f"habit_nets.{net}", [6], stages=1, train__batch_size=4))
