"""Which ranks read which samples: each group of pp and tp reads a sample once, unless it is set to read more."""

from __future__ import annotations

import pytest

from launcher.plan.resolve.dataset_strategy import BatchReading, roles
from launcher.plan.values.grid import Grid

GRID = Grid.of(pp=2, dp_replicate=1, dp_shard=2, tp=2)  # rank = 4 pp + 2 dp + tp

WHO = {
    0: ({0, 1, 2, 3}, {4, 5, 6, 7}),
    1: ({0, 1, 2, 3}, {0, 1, 2, 3}),
    2: ({0, 2}, {4, 6}),
    3: ({0, 2}, {0, 2}),
}


def how(level: int) -> BatchReading:
    return BatchReading(2, level in (1, 3), level in (2, 3))


@pytest.mark.parametrize("level", WHO)
def test_each_level_has_its_readers(level: int) -> None:
    both = [roles(how(level), GRID, 0, 1, rank) for rank in range(8)]
    assert tuple({r for r in range(8) if both[r][what].reads} for what in (0, 1)) == WHO[level]


@pytest.mark.parametrize("level", WHO)
@pytest.mark.parametrize("last", [0, 1], ids=["V schedule", "last stage on the last rank"])
def test_every_rank_that_uses_something_reads_it_or_is_given_it(level: int, last: int) -> None:
    for what, user in enumerate((0, last)):
        role = {rank: roles(how(level), GRID, 0, last, rank)[what] for rank in range(8)}
        assert {r for r in role if role[r].uses} == set(GRID.ranks(pp=user))
        given = sorted((giver, taker) for giver in role for taker in role[giver].gives)
        assert given == sorted((role[r].takes, r) for r in role if role[r].takes is not None)
        for r in role:
            assert role[r].uses == (role[r].reads or role[r].takes is not None) or (role[r].reads and role[r].gives)
            assert not (role[r].reads and role[r].takes is not None)
