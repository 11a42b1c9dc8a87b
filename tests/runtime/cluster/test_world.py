"""A rank that something else started finds its rank and world size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.runtime.cluster.launch_env import first_host, place, tasks_per_node
from launcher.runtime.cluster.world import World, connect, deterministic, world_at
from tests.ports import free_port
from tests.ranks import on_ranks

ROOT = Path(__file__).parents[3]
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NODELIST": "gpu[01-02]", "SLURM_JOB_ID": "77",
}  # fmt: skip


def test_the_variables_of_torchrun_give_the_place_of_a_rank():
    assert world_at(place(TORCHRUN), "cuda") == World(5, 8, 1, 4, 2, "cuda:1", "cpu:gloo,cuda:nccl")


def test_the_variables_of_srun_give_the_place_of_a_rank():
    assert world_at(place(SRUN), "cpu") == World(5, 7, 1, 3, 0, "cpu", "gloo")


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {k: v for k, v in SRUN.items() if "STEP" not in k},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["nothing", "the only rank", "the shell of sbatch", "srun of one task"],
)
def test_a_process_without_an_outer_launcher_has_no_place(env):
    assert place(env) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[007-009,12],x", "gpu007"), ("a[3,5]-ib", "a3-ib"), ("a-b[01-02]", "a-b01")],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_tasks_per_node_are_spelled_out():
    assert tasks_per_node("2(x3),1,4(x1)") == (2, 2, 2, 1, 4)


def test_ranks_of_torchrun_share_its_store():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    done = subprocess.run(
        [*command, "tests.runtime.joining"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 of 2: 3.0", "rank 1 of 2: 3.0"], done.stderr


def test_ranks_of_srun_meet_at_the_first_host():
    port = str(free_port())
    step = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "MASTER_PORT": port,
        "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "77",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.runtime.joining"]
    tasks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [task.communicate(timeout=300)[0] for task in tasks] == ["rank 0 of 2: 3.0\n", "rank 1 of 2: 3.0\n"]


def test_deterministic_mode_refuses_nondeterministic_operations():
    def work(_: World) -> str:
        deterministic()
        try:
            torch.empty(2, 2).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
        except RuntimeError as error:
            return str(error)
        return "accepted"

    [text] = on_ranks(1, work)
    assert text.startswith("put_ does not have a deterministic implementation")


def test_the_environment_of_a_process_that_was_a_rank_is_as_before(monkeypatch):
    monkeypatch.delenv("TORCH_DIST_INIT_BARRIER", raising=False)

    def work(world: World) -> tuple[str | None, str | None]:
        with connect(world, torch.distributed.HashStore(), 20):
            within = os.environ.get("TORCH_DIST_INIT_BARRIER")
        return within, os.environ.get("TORCH_DIST_INIT_BARRIER")

    assert on_ranks(1, work, alone=True) == [("1", None)]
