"""The batch file for Slurm: what it asks of Slurm, what it does when told to stop, what the next start goes on with."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.run.launching import ROOT, TINY, checkpoints, losses, run, status, steps, until, whole

FILE = ROOT / "docs" / "slurm.sbatch"
SRUN = """#!/bin/bash
# The tasks of one step on two nodes, as srun starts them; it ends with the highest of their codes.
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE="1(x2)"
export SLURM_STEP_NODELIST=localhost SLURM_LOCALID=0
for i in 0 1; do
    SLURM_PROCID=$i SLURM_NODEID=$i "$@" &
    echo $! >> pids
done
code=0
for pid in $(cat pids); do
    wait "$pid"
    ended=$?
    [ $ended -gt $code ] && code=$ended
done
rm pids
exit $code
"""
SCONTROL = """#!/bin/bash
echo "$@" >> asked
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder to submit from, with the environment that the file activates, and the file."""
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    path = f"{Path(sys.executable).parent}:$PATH"
    (bin / "activate").write_text(f"export PATH={path} PYTHONPATH={ROOT}\n")
    shutil.copy(FILE, tmp_path)
    return tmp_path


def words(place: Path, n: int) -> list[str]:
    return [*TINY, f"runs={place}/runs", f"train.steps={n}", "launch.device=cpu"]


def test_it_is_bash() -> None:
    done = subprocess.run(["bash", "-n", FILE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_it_asks_for_stands_before_the_first_command() -> None:
    """Slurm looks no further; a comment behind an option would be a part of it."""
    head, body = FILE.read_text().split("\nset -u\n")
    options = [line for line in head.splitlines() if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=[\w%:@.-]+)?", line) for line in options)
    assert "#SBATCH" not in body
    assert "#SBATCH --signal=USR1@300" in options  # no "B:", which would tell the shell alone


def batch(place: Path, n: int, restarts: int, port: str) -> subprocess.Popen[str]:
    """What Slurm does with it, as far as the file can see."""
    bin = place / "bin"
    bin.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    env = os.environ | {
        "PATH": f"{bin}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(place), "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": str(restarts), "MASTER_PORT": port,
    }  # fmt: skip
    with (place / f"{restarts}.log").open("w") as log:
        return subprocess.Popen(
            ["bash", place / FILE.name, *words(place, n), "parallel.pipeline.stages=1"],
            env=env,
            stdout=log,
            stderr=log,
            text=True,
        )


def test_told_to_stop_it_asks_to_be_requeued_and_goes_on(place: Path) -> None:
    runs = place / "runs" / "lm_tied_pp2_hsdp2"
    first = batch(place, 20, 0, str(free_port()))
    try:
        until(lambda: (runs / "0001/metrics.jsonl").exists() and max(whole(runs / "0001"), default=0) >= 2, first)
    finally:
        for pid in (place / "pids").read_text().split():
            os.kill(int(pid), signal.SIGUSR1)  # as --signal does it
    assert first.wait(300) == 75
    assert (place / "asked").read_text() == "requeue 77\n"
    [saved] = checkpoints(runs / "0001")
    assert batch(place, 20, 1, str(free_port())).wait(120) == 0
    assert f"going on from {saved}" in (place / "1.log").read_text()
    assert (place / "asked").read_text() == "requeue 77\n"
    assert sorted(os.listdir(runs)) == ["0001", "latest"]
    assert steps(runs / "0001") == list(range(1, 21))


@pytest.mark.skipif(
    "SLURM_TEST" not in os.environ, reason="SLURM_TEST=1 would submit jobs to the Slurm of this machine"
)
def test_a_real_slurm_runs_stops_and_requeues_it(place: Path) -> None:
    options = ["--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10"]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1"}  # its nodes may be names that only Slurm knows
    submit = ["sbatch", "--parsable", *options, FILE.name, *words(place, 60)]
    job = subprocess.run(submit, cwd=place, env=env, capture_output=True, text=True, check=True).stdout.strip()
    home = place / "runs" / "lm_tied_pp2_hsdp2" / "0001"
    try:
        waited(lambda: (home / "metrics.jsonl").exists() and max(whole(home), default=0) >= 2)
        subprocess.run(["scancel", "--signal=USR1", job], check=True)
        waited(lambda: (home / "status.json").exists() and status(home)["status"] == "done")
    finally:
        subprocess.run(["scancel", job], check=True)
    log = (place / f"slurm-{job}.log").read_text()
    assert log.count("preempted by SIGUSR1: saved step-") == log.count("going on from step-") == 1
    assert losses(home) == losses(run(place / "alone", steps=60))


def waited(done: Callable[[], bool], within_s: float = 200) -> None:
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)
