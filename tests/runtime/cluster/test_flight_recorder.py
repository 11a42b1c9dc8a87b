"""When a collective hangs, the run folder has a record of what the ranks did before."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher.runtime.cluster.flight_recorder import prefix, recording, variables, written
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import RanksFailed
from tests.ranks import on_ranks


def test_torch_is_told_to_remember_and_where_to_write():
    assert variables(Path("/runs/a/0001"), {}) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/a/0001/logs/flight-rank",
    }


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("TORCH_FR_BUFFER_SIZE", {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}),
        ("TORCH_FR_DUMP_TEMP_FILE", {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}),
    ],
)
def test_variables_of_the_user_are_kept_also_under_their_old_names(name, left):
    assert variables(Path("/run"), {name: "7"}).keys() == left


def test_the_environment_is_as_before_afterwards(tmp_path):
    before = dict(os.environ)
    with recording(tmp_path):
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(prefix(tmp_path))
    assert dict(os.environ) == before


def test_without_a_run_folder_nothing_is_set():
    before = dict(os.environ)
    with recording(None):
        assert dict(os.environ) == before


def test_the_flight_recorder_is_enabled_before_the_first_process_group(tmp_path):
    """Otherwise torch would have no buffer: it reads the size when it makes the first group."""

    def work(_: World) -> list[str]:
        dist.all_reduce(torch.ones(3))
        said = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
        return [entry["profiling_name"] for entry in said["entries"]]

    [names] = on_ranks(1, work, folder=tmp_path)
    assert "gloo:all_reduce" in names


def late(world: World) -> None:
    dist.all_reduce(torch.ones(7))
    if world.rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(5, 3))


def test_the_last_collectives_of_a_rank_that_waited_in_vain_are_in_the_run_folder(tmp_path):
    with pytest.raises(RanksFailed) as caught:
        on_ranks(2, late, timeout_s=8, folder=tmp_path)
    lines = str(caught.value).splitlines()
    where = f"{__file__}:{late.__code__.co_firstlineno + 3}"
    assert lines[0] == f"rank 1 hung for 8 s (launch.timeout_s): it is at {where}, in late"
    assert lines[-2:] == [
        f"last collectives of each rank that waited: {tmp_path}/logs/flight-*",
        f"log: {tmp_path}/logs/rank1.log",
    ]
    [dump] = written(tmp_path)
    assert dump == tmp_path / "logs/flight-gloo-rank0.json"
    entries = json.loads(dump.read_text())["entries"]
    assert [e["input_sizes"] for e in entries][-2:] == [[[7]], [[5, 3]]]


def test_a_run_that_goes_well_leaves_none(tmp_path):
    on_ranks(2, lambda _: dist.all_reduce(torch.ones(1)), folder=tmp_path)
    assert written(tmp_path) == []


def test_a_failure_that_is_no_hang_leaves_none(tmp_path):
    def work(world: World) -> None:
        if world.rank == 1:
            raise ValueError("wrong")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RanksFailed, match="rank 1: ValueError: wrong"):
        on_ranks(2, work, folder=tmp_path)
    assert written(tmp_path) == []


def ends_itself(world: World) -> None:
    """Write a record and abort, as NCCL's watchdog does; rank 1 only sleeps."""
    if world.rank == 1:
        time.sleep(600)
    Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{world.rank}").write_bytes(b"dump")
    os.abort()


def test_a_rank_that_the_watchdog_of_nccl_has_ended_was_waiting_for_another(tmp_path):
    with pytest.raises(RanksFailed) as caught:
        on_ranks(2, ends_itself, timeout_s=30, folder=tmp_path)
    lines = str(caught.value).splitlines()
    where = f"{__file__}:{ends_itself.__code__.co_firstlineno + 3}"
    assert lines == [
        f"rank 1 hung for 30 s (launch.timeout_s): it is at {where}, in ends_itself",
        "also ended: rank 0 (lost its peer)",
        f"last collectives of each rank that waited: {tmp_path}/logs/flight-*",
        f"log: {tmp_path}/logs/rank1.log",
    ]


def test_a_rank_that_aborts_for_another_reason_is_to_blame(tmp_path):
    (tmp_path / "logs").mkdir()
    old = Path(f"{prefix(tmp_path)}0")
    old.write_bytes(b"of a start before this one")
    os.utime(old, (0, 0))
    with pytest.raises(RanksFailed) as caught:
        on_ranks(1, lambda _: os.abort(), folder=tmp_path)
    assert str(caught.value).startswith("rank 0 was killed by SIGABRT (native code aborted")
