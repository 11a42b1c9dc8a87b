"""The time of each rank's own work, without the time that it waits for others."""

from __future__ import annotations

import time
from functools import partial
from threading import Thread

import torch
import torch.distributed as dist

from launcher.runtime.cluster.world import World
from launcher.runtime.torch_private.work_wait import seconds_waited
from launcher.runtime.training.throughput import RankTimes, rank_figures
from tests.ranks import here

SLOW_S = 0.2


def _step(world: World, slow: int) -> list[float]:
    """Two steps with a message, a collective and an asynchronous one; one rank sleeps before each of them."""
    times = RankTimes(world.rank, world.size)
    for _ in range(2):
        times.begin()
        x = torch.ones(2)
        for act in (partial(dist.all_reduce, x, async_op=True), partial(dist.broadcast, x, 0, async_op=True)):
            time.sleep(SLOW_S if world.rank == slow else 0)
            act().wait()
        time.sleep(SLOW_S if world.rank == slow else 0)
        if world.rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        times.arrived()
    mine = times.share()
    assert times.share().tolist() == [0, 0]  # no step since the last call
    dist.all_reduce(mine)
    found: list[float] = mine.tolist()
    return found


def test_the_rank_that_others_wait_for_is_the_slow_one():
    slow_ms = 3 * SLOW_S * 1e3
    for slow in (0, 1):
        seen, same = here(partial(_step, slow=slow), 2)
        assert seen == same
        told = rank_figures(seen)
        assert (told["worst_rank"], told["step_ms_worst"]) == (slow, seen[slow])
        assert seen[slow] >= slow_ms > 2 * seen[1 - slow]


def test_a_step_that_nobody_began_is_none():
    times = RankTimes(0, 2)
    times.arrived()
    assert times.share().tolist() == [0, 0]


def _beside(world: World) -> float:
    """Another thread waits, but this one does not."""
    seconds_waited()
    group = dist.new_group()
    x = torch.ones(1)

    def all_of_it() -> None:
        if world.rank:
            time.sleep(SLOW_S)
        dist.all_reduce(x, group=group)

    before = seconds_waited()
    thread = Thread(target=all_of_it)
    thread.start()
    thread.join()
    return seconds_waited() - before


def test_waits_of_another_thread_are_not_subtracted_from_a_step():
    assert here(_beside, 2) == [0, 0]
