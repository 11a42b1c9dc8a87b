"""The batch file that is written for Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.job.compose import compose
from launcher.job.overrides import read
from launcher.run.slurm import with_signal_s
from launcher.run.slurm_files import RankLayout, RunPaths, batch_text

RUN = Path("/shared/me/runs/big/0001")
AT = RunPaths(RUN, Path("/shared/me"), Path("/shared/me/.venv/bin/python"), RUN / ".secret")
WHOLE = """\
#!/bin/bash
# Written by launcher for the run folder that contains this file. A stopped job is requeued;
# to resume a job that has failed: sbatch /shared/me/runs/big/0001/job.sbatch
#SBATCH --job-name=big
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --partition=gpu
#SBATCH --account=us
#SBATCH --time=1-12
#SBATCH --signal=USR2@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/me/runs/big/0001/slurm-%j.log
#SBATCH --constraint=h100
set -u

cd /shared/me || exit 1
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # since 22.05 srun does not inherit it
export LAUNCHER_SECRET_FILE=/shared/me/runs/big/0001/.secret  # the secret that signs messages between ranks
module load cuda
export NCCL_SOCKET_IFNAME=ib0

# 600 s before the time limit every task gets a signal, saves and exits with 75;
# a task that is still starting is ended by the signal itself (140).
srun --container-image=/images/us.sqsh /shared/me/.venv/bin/python -m launcher \
recipe=/shared/me/runs/big/0001/request.yaml run_dir=/shared/me/runs/big/0001
code=$?
if [ "$code" -eq 75 ] || [ "$code" -eq 140 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
ALL = [
    "cpus_per_task=12", "partition=gpu", "account=us", "time=1-12", "signal_s=600", "extra=['--constraint=h100']",
    'setup=["module load cuda","export NCCL_SOCKET_IFNAME=ib0"]', "container=/images/us.sqsh",
]  # fmt: skip


def written(*slurm: str, ranks: RankLayout = RankLayout(8, 8, gpus=True), at: RunPaths = AT) -> str:  # noqa: B008
    words = ["recipe=lm_single", "name=big", "launch=slurm", *(f"launch.slurm.{word}" for word in slurm)]
    asked = compose(words).job.launch.slurm
    assert asked is not None
    return batch_text("big", with_signal_s(asked, ())[0], ranks, at)


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_everything_that_can_be_asked_for() -> None:
    assert written(*ALL) == WHOLE


def test_options_that_are_not_set_are_left_to_the_cluster() -> None:
    assert options(written(ranks=RankLayout(1, 2, gpus=False))) == [
        "job-name=big", "nodes=1", "ntasks-per-node=2", "signal=USR2@300", "requeue", "open-mode=append",
        "output=/shared/me/runs/big/0001/slurm-%j.log",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("codes", "ended", "times"),
    [
        ([0], 0, 1), ([1, 0], 0, 2), ([1, 137, 143, 1, 0], 143, 3), ([2, 0], 2, 1), ([1, 75], 75, 2),
        ([1, 140], 140, 2), ([130], 130, 1),
    ],
)  # fmt: skip
def test_ranks_that_fail_start_again_as_often_as_they_may(codes, ended, times, tmp_path, monkeypatch):
    """Fake Slurm commands: srun ends with one code after the other."""
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    take = 'code=$(head -n1 codes); sed -i 1d codes; echo started >>starts; exit "$code"'
    for name, body in {"srun": take, "scontrol": 'echo "$@" >>requeued'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = written(ranks=RankLayout(1, 2, False, restarts=2), at=RunPaths(tmp_path, tmp_path, tmp_path / "python"))
    assert subprocess.run(["bash", "-c", found]).returncode == ended
    assert (tmp_path / "starts").read_text().count("started") == times
    assert (tmp_path / "requeued").exists() == (ended in (75, 140))


@pytest.mark.parametrize(("asked", "gpus"), [("gpus_per_node=4", "4"), ("gpus_per_node=null", "8")])
def test_a_gpu_a_rank_unless_told_otherwise(asked: str, gpus: str) -> None:
    assert f"gpus-per-node={gpus}" in options(written(asked))
    assert not [o for o in options(written("gpus_per_node=0")) if o.startswith("gpus")]


def test_a_path_with_a_blank_and_a_percent_sign(tmp_path: Path) -> None:
    """Slurm reads quotes as a shell does, and replaces %."""
    at = RunPaths(Path("/my runs/50%/0001"), Path("/my runs"), Path("/my runs/.venv/bin/python"))
    found = written(at=at)
    assert "output='/my runs/50%%/0001/slurm-%j.log'" in options(found)
    assert "cd '/my runs' || exit 1" in found
    (tmp_path / "job").write_text(found)
    done = subprocess.run(["bash", "-n", tmp_path / "job"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["a=b", "a,b", "it's", "(copy) {1}", "ü", "a\\b", "12", "$x", "#1;"])
def test_the_ranks_read_the_folder_of_the_run(name: str) -> None:
    """The batch file quotes for the shell and for the grammar of overrides."""
    run = Path("/runs") / name
    found = written(at=RunPaths(run, Path("/runs"), Path("/python")))
    *_, recipe, run_dir = shlex.split(next(line for line in found.splitlines() if " -m launcher " in line))
    assert [o.value for o in read((recipe, run_dir), [])] == [f"{run}/request.yaml", str(run)]


def test_slurm_reads_options_before_the_first_command_only() -> None:
    head, body = written(*ALL).split("\nset -u\n")
    assert all(line.startswith("#") for line in head.splitlines())
    assert "#SBATCH" not in body


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("30", 1800), ("1:30", 90), ("02:00:00", 7200), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:1", 86401)],
)
def test_times_are_read_as_slurm_reads_them(time: str, seconds: int) -> None:
    from launcher.run.slurm import time_s

    assert time_s(time) == seconds


def test_minutes_may_be_a_number(tmp_path: Path) -> None:
    assert "time=30" in options(written("time=30"))


def test_a_number_to_base_60_is_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from launcher.__main__ import main

    recipe: Any = tmp_path / "mine.yaml"
    recipe.write_text("launch:\n  slurm: {time: 12:00:00}\n")
    assert main([f"recipe={recipe}", "launch=slurm", "show=config"]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  {recipe}:2:17: 12:00:00 is a number in base 60 in YAML; in quotes it is text: '12:00:00'\n"
    )
    recipe.write_text("launch:\n  slurm: {time: '12:00:00'}\ntrain: {steps: 1, batch_size: 1}\n")
    assert main([f"recipe={recipe}", "launch=slurm", "show=config"]) == 0
    assert "time: '12:00:00'" in capsys.readouterr().out
