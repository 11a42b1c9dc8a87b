"""The batch files of many runs: a Slurm array, or one allocation that the runs share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launcher.errors import Problem
from launcher.job.overrides import read
from launcher.job.schema.launch import Slurm
from launcher.run.slurm import with_signal_s
from launcher.run.slurm_files import ManyRuns, RankLayout, array_text

ME = Path("/shared/me")
RUNS = tuple(ME / "runs/sweeps/0001" / name for name in ("0-1f1b", "1-gpipe", "2 x"))


def many(slurm: Slurm, **more) -> str:
    known = {
        "name": "sweep-0001", "runs": RUNS, "ranks": RankLayout(2, 4, gpus=True), "slurm": with_signal_s(slurm, ())[0],
        "folder": ME / "runs/sweeps/0001", "started": ME, "python": ME / ".venv/bin/python",
        "secret": ME / "runs/sweeps/0001/.secret",
    }  # fmt: skip
    return array_text(ManyRuns(**{**known, **more}))


@pytest.mark.parametrize("folder", ["a=b", "it's (1)", "ü"])
def test_the_ranks_of_each_run_read_its_folder(folder: str, tmp_path: Path) -> None:
    """The batch file quotes for the shell and for the grammar of overrides."""
    at = tmp_path / folder
    runs = (at / "0-1f1b", at / "1-gpipe")
    text = many(Slurm(time=60), folder=at, runs=runs, started=tmp_path, secret=None)
    show = "srun() { printf '%s\\n' \"${@: -2}\"; }\nSLURM_ARRAY_TASK_ID=1 SLURM_JOB_ID=7\n"
    done = subprocess.run(["bash", "-c", show + text], capture_output=True, text=True, check=True)
    problems: list[Problem] = []
    words = read(done.stdout.splitlines(), problems)
    assert ([o.value for o in words], problems) == ([f"{runs[1]}/request.yaml", str(runs[1])], [])


ARRAY = """\
#!/bin/bash
# Written by launcher: each task of this array is one run, and is requeued separately.
#SBATCH --job-name=sweep-0001
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=60
#SBATCH --signal=USR2@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/me/runs/sweeps/0001/slurm-%A_%a.log
#SBATCH --array=0-2%8
set -u

cd /shared/me || exit 1
export LAUNCHER_SECRET_FILE=/shared/me/runs/sweeps/0001/.secret  # the secret that signs messages between ranks

# 300 s before the time limit every task gets a signal, saves and exits with 75;
# a task that is still starting is ended by the signal itself (140).
runs=(
    /shared/me/runs/sweeps/0001/0-1f1b
    /shared/me/runs/sweeps/0001/1-gpipe
    '/shared/me/runs/sweeps/0001/2 x'
)
run=${runs[$SLURM_ARRAY_TASK_ID]}
srun --output="${run//%/%%}/slurm-$SLURM_JOB_ID.log" --open-mode=append /shared/me/.venv/bin/python -m launcher \
"recipe=$run/request.yaml" "run_dir=$run"
code=$?
if [ "$code" -eq 75 ] || [ "$code" -eq 140 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def test_an_array_has_a_task_for_each_run():
    assert many(Slurm(time="60", array_parallel=8)) == ARRAY
    assert "#SBATCH --array=0-2\n" in many(Slurm())


def test_an_allocation_has_room_for_so_many_at_a_time():
    found = many(Slurm(array=False, array_parallel=3, container="/us.sqsh"))
    assert "#SBATCH --nodes=6\n#SBATCH --ntasks-per-node=4\n" in found
    assert "--array" not in found
    assert "srun --exclusive --nodes=2 --ntasks=8 --ntasks-per-node=4 --output=" in found
    assert "--container-image=/us.sqsh /shared/me/.venv/bin/python" in found
    assert "#SBATCH --nodes=2\n" in many(Slurm(array=False))


@pytest.mark.parametrize("array", [True, False], ids=["array", "allocation"])
@pytest.mark.parametrize(
    ("codes", "code", "requeued"),
    [
        ((0, 0), 0, False),
        ((75, 0), 75, True),
        ((140, 0), 140, True),
        ((1, 0), 1, False),
        ((0, 75), 0, True),
        ((1, 75), 1, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("restarts", [0, 1])
def test_stopped_runs_of_an_array_are_requeued_and_failed_ones_give_their_exit_code(
    array, codes, code, requeued, restarts, tmp_path
):
    """A task of an array runs only the first of the two runs.

    A run that fails is restarted as often as allowed.
    """
    runs = tuple(tmp_path / f"{n} $x" for n in range(2))
    for run, ends in zip(runs, codes, strict=True):
        run.mkdir()
        (run / "code").write_text(str(ends))
    tools = {
        "python": 'for word in "$@"; do case $word in run_dir=*) exit $(cat "${word#run_dir=}/code");; esac; done\n',
        "srun": f'echo >> {tmp_path}/starts\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\n"$@"\n',
        "scontrol": f'echo "$@" >> {tmp_path}/asked\n',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}")
        (tmp_path / name).chmod(0o755)
    file = tmp_path / "cells.sbatch"
    ranks = RankLayout(2, 4, gpus=True, restarts=restarts)
    file.write_text(many(Slurm(array=array), runs=runs, ranks=ranks, started=tmp_path, python=tmp_path / "python"))
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(file)], env=env, capture_output=True, text=True)
    assert done.stderr == ""
    if array:
        code, requeued = codes[0], codes[0] in (75, 140)
    else:
        code = int(1 in codes)
    assert done.returncode == code
    started = codes[:1] if array else codes
    assert len((tmp_path / "starts").read_text().splitlines()) == len(started) + restarts * started.count(1)
    assert (tmp_path / "asked").exists() == requeued
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"
