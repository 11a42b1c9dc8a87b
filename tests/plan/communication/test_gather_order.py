"""A rank gathers groups once per step, in the order of first use, and up to a number of bytes ahead."""

from __future__ import annotations

import pytest

from launcher.plan.communication.buckets_and_gathers import GatherGroup
from launcher.plan.communication.gather_order import AHEAD, Visit, gatherings

ALL = AHEAD // 4


def untils(*sizes: int, ahead: int | None = AHEAD) -> list[int]:
    """The number of groups whose gathering has started when each of ``sizes`` is used; a rank has three stages."""
    groups = tuple(GatherGroup(n % 3, (f"m{n}",), (f"m{n}.weight",), size) for n, size in enumerate(sizes))
    visits = tuple(tuple(Visit(i, True) for i, g in enumerate(groups) if g.stage == s) for s in range(3))
    return [t.until for t in gatherings(groups, visits, (0, 1, 2), ahead)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([ALL] * 4, [4, 4, 4, 4]),
        ([ALL] * 7, [5, 6, 7, 7, 7, 7, 7]),
        ([AHEAD + 1] * 4, [2, 3, 4, 4]),
        ([1], [1]),
        ([], []),
    ],
    ids=["all at once", "so many bytes", "the next one always", "one", "none"],
)
def test_groups_are_gathered_ahead_up_to_so_many_bytes(sizes, expected):
    assert untils(*sizes) == expected


def test_nothing_is_gathered_ahead_where_that_is_not_wanted():
    assert untils(1, 2, 3, ahead=None) == [1, 2, 3]


def test_turns_are_those_of_first_use_stage_by_stage_and_what_is_not_used_comes_last():
    groups = tuple(GatherGroup(s, (f"m{n}",), (), 1) for n, s in enumerate((1, 0, 0, 0)))
    visits = ((Visit(2, True), Visit(2, False), Visit(1, True), Visit(2, True)), (Visit(0, True),))
    assert [t.group for t in gatherings(groups, visits, (0, 1), AHEAD)] == [2, 1, 3, 0]


def test_weights_that_a_call_replaces_are_gathered_before_the_forward():
    groups = tuple(GatherGroup(0, (f"m{n}",), (), 1) for n in range(3))
    visits = (tuple(Visit(n, True) for n in range(3)),)
    assert [t.early for t in gatherings(groups, visits, (0,), AHEAD, ("m1.inner",))] == [False, True, False]
