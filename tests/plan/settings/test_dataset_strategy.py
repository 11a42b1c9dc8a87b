"""Who reads what: every sample once a pipeline and tensor-parallel group, unless asked to read more."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.plan.settings.dataset_strategy import Reading, hands
from launcher.plan.values.grid import Grid
from launcher.planner.plan_job import before_torch
from tests.plan.made import job, words

GRID = Grid.of(pp=2, dp_replicate=1, dp_shard=2, tp=2)  # rank = 4 pp + 2 dp + tp
KEY = "parallel.dataset_strategy"

WHO = {
    0: ({0, 1, 2, 3}, {4, 5, 6, 7}),
    1: ({0, 1, 2, 3}, {0, 1, 2, 3}),
    2: ({0, 2}, {4, 6}),
    3: ({0, 2}, {0, 2}),
}


def how(level: int) -> Reading:
    return Reading(2, level in (1, 3), level in (2, 3))


@pytest.mark.parametrize("level", WHO)
def test_each_level_has_its_readers(level: int) -> None:
    both = [hands(how(level), GRID, 0, 1, rank) for rank in range(8)]
    assert tuple({r for r in range(8) if both[r][what].reads} for what in (0, 1)) == WHO[level]


@pytest.mark.parametrize("level", WHO)
@pytest.mark.parametrize("last", [0, 1], ids=["V schedule", "last stage on the last rank"])
def test_every_rank_that_uses_something_reads_it_or_is_given_it(level: int, last: int) -> None:
    for what, user in enumerate((0, last)):
        hand = {rank: hands(how(level), GRID, 0, last, rank)[what] for rank in range(8)}
        assert {r for r in hand if hand[r].uses} == set(GRID.ranks(pp=user))
        given = sorted((giver, taker) for giver in hand for taker in hand[giver].gives)
        assert given == sorted((hand[r].takes, r) for r in hand if hand[r].takes is not None)
        for r in hand:
            assert hand[r].uses == (hand[r].reads or hand[r].takes is not None) or (hand[r].reads and hand[r].gives)
            assert not (hand[r].reads and hand[r].takes is not None)


REFUSED = {
    "[[2,2],[2,2]]": "[[2,2],[2,2]]: item [0][1] = 2: only dim 0, the samples, is handed out to ranks; what cuts a "
    f"sequence cuts it inside the model (parallel.operators) (try: '{KEY}=[[2,1],[2,1]]')",
    "[[2,1],[1,1]]": "[[2,1],[1,1]]: dim 0 is cut in 1 and in 2: inputs and targets of a sample go together",
    "[[3,1],[3,1]]": "[[3,1],[3,1]]: dim 0 is cut in 3: does not divide the 4 data-parallel ranks; what does: 1, 2, 4 "
    f"(try: '{KEY}=[[2,1],[2,1]]')",
    "[[4,1],[4]]": "[[4,1],[4]]: a batch has 2 tensors: input 0 has 2 dims, the target has 2 dims "
    f"(try: '{KEY}=[[4,1],[4,1]]')",
    "[[4,1]]": "[[4,1]]: a batch has 2 tensors: input 0 has 2 dims, the target has 2 dims "
    f"(try: '{KEY}=[[4,1],[4,1]]')",
    "[]": "[]: should be a list a tensor, with a number of slices a dim",
    "[[]]": "[[]]: should be a list a tensor, with a number of slices a dim",
}  # fmt: skip


@pytest.mark.parametrize("strategy", REFUSED)
def test_slices_that_cannot_be_handed_out_are_refused_and_the_cure_accepted(strategy: str) -> None:
    typed = [f"{KEY}={strategy}", "launch.nproc=4"]
    with pytest.raises(RequestError) as caught:
        before_torch(job(*typed))
    assert str(caught.value) == f"{KEY}: {REFUSED[strategy]}"
    if "try: " in REFUSED[strategy]:
        before_torch(job(*typed, *words(caught.value)))
