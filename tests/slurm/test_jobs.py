"""Jobs on a real Slurm of two nodes: stopped in every way that Slurm has, they end as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from launcher.__main__ import main
from tests.run.launching import TINY, complete_steps, last, losses, run, shape, status, tensors
from tests.slurm.cluster import missing, until

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(900)]
PP2_HSDP2 = shape(pp=2, shard=2)
SLOW_S = 300


def submitted(job: Path, n: int, *more: str) -> str:
    """Submit a job on 2 x 2 ranks, and return its number."""
    nodes = ["launch=slurm", "launch.device=cpu", *PP2_HSDP2, "launch.nnodes=2", "launch.nproc=2"]
    assert main([*TINY, *nodes, f"train.steps={n}", f"run_dir={job}", "checkpoint.every=10", *more]) == 0
    return str(status(job)["slurm"])


def trained(job: Path, step: int) -> bool:
    return (job / "metrics.jsonl").exists() and max(complete_steps(job), default=0) >= step


def is_(job: Path, state: str) -> bool:
    return status(job)["status"] == state


def undisturbed(tmp_path: Path, n: int) -> Path:
    return run(tmp_path / "alone", *PP2_HSDP2, "checkpoint.every=10", steps=n)


def same(job: Path, alone: Path, n: int) -> None:
    """Assert that losses, weights and optimizer state are equal to the last bit."""
    assert losses(job) == losses(alone)
    assert tensors(job, n) == tensors(alone, n)


def test_told_to_save_and_requeued_by_hand(cluster: None, tmp_path: Path) -> None:
    job, n = tmp_path / "job", 60
    number = submitted(job, n)
    until(lambda: trained(job, 2), SLOW_S, "it does not start")
    subprocess.run(["scancel", "--signal=USR2", number], check=True)
    until(lambda: is_(job, "preempted"), SLOW_S, "it does not stop")
    until(lambda: is_(job, "running") and trained(job, 30), SLOW_S, "it does not go on")
    subprocess.run(["scontrol", "requeue", number], check=True)
    until(lambda: is_(job, "done"), SLOW_S, "it does not end")
    assert (job / f"slurm-{number}.log").read_text().count("resuming from step-") == 2
    same(job, undisturbed(tmp_path, n), n)


def test_a_job_at_its_time_limit_saves_and_is_requeued(cluster: None, tmp_path: Path) -> None:
    """The job requests two minutes. Slurm ends it after one or two, and sends the signal 20 s earlier."""
    job, n = tmp_path / "job", 40
    slow = "callbacks=[{_target_: tests.slurm.slow_steps.SlowSteps, seconds: 3}]"
    more = ["launch.slurm.time=2", "launch.slurm.signal_s=20", slow, "security.allow=[tests.slurm.slow_steps]"]
    number = submitted(job, n, *more)
    until(lambda: is_(job, "done"), 2 * SLOW_S, "it does not end")
    log = (job / f"slurm-{number}.log").read_text()
    assert log.count("preempted by SIGUSR2: saved step-") == log.count("resuming from step-") >= 1
    same(job, undisturbed(tmp_path, n), n)


def test_a_node_is_lost(cluster: None, tmp_path: Path) -> None:
    """All of the node's processes end at once, as in a power failure; the failed job is not requeued."""
    job, n = tmp_path / "job", 60
    number = submitted(job, n)
    until(lambda: trained(job, 15), SLOW_S, "it does not start")
    for pid in on_node(1):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not queued(number), SLOW_S, "it does not end")
    assert last(job).name == "step-000010"

    # submit the same file again
    subprocess.run(["sbatch", job / "job.sbatch"], check=True, capture_output=True)
    until(lambda: is_(job, "done"), SLOW_S, "it does not go on")
    same(job, undisturbed(tmp_path, n), n)


def test_a_drill_of_a_node_that_is_lost(cluster: None, tmp_path: Path) -> None:
    """The ranks of a node are killed at the start of a step; the batch file starts all ranks again."""
    job = tmp_path / "job"
    fault = ["debug.drill={lose_node: {node: 1, step: 15}}", "launch.max_restarts=1", "launch.timeout_s=60"]
    number = submitted(job, 20, *fault)
    until(lambda: (job / "drill.json").exists(), SLOW_S, "the drill does not end")
    until(lambda: not queued(number), SLOW_S, "the job does not end")
    said = json.loads((job / "drill.json").read_text())
    assert (said["steps_lost"], said["resumed_step"], said["bit_identical"]) == (4, 10, True)
    assert is_(job, "done")


def on_node(index: int) -> list[int]:
    """The process ids of the ranks on that node."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            env, words = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f"\0SLURM_NODEID={index}\0".encode() in env and b"\0launcher\0" in words:
            found.append(int(folder.name))
    assert len(found) >= 2
    return found


def queued(number: str) -> bool:
    done = subprocess.run(["squeue", "-h", "-o", "%i"], check=True, capture_output=True, text=True)
    return number in done.stdout.split()
