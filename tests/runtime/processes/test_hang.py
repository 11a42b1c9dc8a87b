"""The error names the rank that hangs, not one that waited for it; no group waits longer than its timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from launcher.parallel import mesh
from launcher.plan.values.grid import Grid
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import RanksFailed
from launcher.runtime.processes.hang import halted, waits
from launcher.runtime.training.save_thread import Saver
from tests.ranks import on_ranks


def timeouts() -> dict[str, float]:
    """The timeout of every group of this rank, by the group's description."""
    groups = dist.distributed_c10d._world.pg_map
    cpu = torch.device("cpu")
    return {str(g.group_desc): g._get_backend(cpu).options._timeout.total_seconds() for g in groups}


def test_every_group_takes_the_timeout_whoever_makes_it():
    def work(world: World) -> list[float]:
        grid = Grid((("pp", 2), ("dp_replicate", 1), ("dp_shard", 1), ("tp", 2)))
        groups = mesh.build(grid, "cpu", ())
        kept = [groups, Saver(), dist.new_group([0, 1]), groups.mesh._flatten("all")]
        found = list(timeouts().values())
        del kept
        return found

    for found in on_ranks(4, work, timeout_s=47):
        assert len(found) >= 4
        assert set(found) == {47.0}


def test_a_group_made_later_by_somebody_else_is_not_changed():
    assert dist.distributed_c10d.default_pg_timeout.total_seconds() == 1800


def hanging(how):
    """Rank 1 hangs; rank 0 waits for it in a group of these two, and the others wait for both."""

    def work(world: World) -> None:
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1))
        if world.rank == 1:
            how()
        if world.rank < 2:
            dist.all_reduce(torch.ones(1), group=pair)
        dist.all_reduce(torch.ones(1))

    return work


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(600)


def spin() -> None:
    any(iter(int, 1))


def where(how) -> str:
    return f"it is at {__file__}:{how.__code__.co_firstlineno + 1}, in {how.__name__}"


HOW = {
    "stopped": (stop, "it is stopped (SIGSTOP, Ctrl-Z or a debugger)"),
    "asleep": (sleep, where(sleep)),
    "in a loop": (spin, where(spin)),
}


@pytest.mark.parametrize(("how", "told"), HOW.values(), ids=HOW)
def test_the_rank_that_hangs_is_named_and_where_it_is(how, told):
    with pytest.raises(RanksFailed) as caught:
        on_ranks(3, hanging(how), timeout_s=2)
    assert str(caught.value).splitlines()[0] == f"rank 1 hung for 2 s (launch.timeout_s): {told}"


def test_a_rank_that_is_stopped_is_found_though_nobody_waits_for_it():
    with pytest.raises(RanksFailed) as caught:
        on_ranks(1, lambda _: stop(), timeout_s=1, alone=True)
    assert str(caught.value) == (
        "rank 0 hung for 1 s (launch.timeout_s): it is stopped (SIGSTOP, Ctrl-Z or a debugger)"
    )


def test_a_pause_that_is_shorter_is_none():
    code = "import os, signal, time; time.sleep(1.5); os.kill({pid}, signal.SIGCONT)"

    def work(_: World) -> str:
        subprocess.Popen([sys.executable, "-c", code.format(pid=os.getpid())])
        stop()
        return "went on"

    assert on_ranks(1, work, timeout_s=30) == ["went on"]


MAIN = """\
Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in wait
  File "/a/mine.py", line 2 in work

Thread 0x02 (most recent call first):
"""


@pytest.mark.parametrize(
    ("stack", "told"),
    [
        ('  File "/v/torch/distributed/distributed_c10d.py", line 3 in all_reduce\n', True),
        ('  File "/v/torch/_ops.py", line 3 in __call__\n  File "/v/torch/distributed/x.py", line 1 in wait\n', True),
        ('  File "/a/mine.py", line 3 in forward\n  File "/v/torch/distributed/fsdp/x.py", line 1 in f\n', False),
        ('  File "/usr/lib/python3.11/threading.py", line 9 in join\n', False),
        ('  File "/v/launcher/parallel/mesh.py", line 40 in to_host\n', True),
        ('  File "/v/launcher/parallel/mesh.py", line 50 in grad\n', False),
        ("", False),
    ],
    ids=[
        "in a collective",
        "behind an operator",
        "in a layer",
        "for a thread",
        "for its device",
        "beside that",
        "no answer",
    ],
)
def test_the_stack_shows_whether_a_rank_waits(stack, told):
    assert waits(MAIN + stack) is told


def test_a_rank_that_joins_its_own_thread_waits_where_the_thread_does():
    other = MAIN.replace("threading.py", "torch/distributed/distributed_c10d.py")
    assert waits(other + '  File "/usr/lib/python3.11/threading.py", line 9 in join\n')


def test_only_a_stopped_process_is_stopped():
    assert not halted(os.getpid())
    assert not halted(2**22 + 1)
