"""Sweeps: every cell is checked before any runs, each runs in its own process, and a failure ends only its own cell."""

from __future__ import annotations

import csv
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.errors import RequestError
from launcher.extras.sweep.run_sweep import sweep
from launcher.job.args import Args
from launcher.job.compose import compose
from launcher.job.config_folders import ConfigFiles
from launcher.job.cures.report import as_yaml
from launcher.runtime.run_folder import locked
from tests.tiers import exhaustive

# A cell behaves as a run: status.json in run_dir, done or failed; seed=1 dies, seed=2 fails with a message.
CELL = """
import json, os, sys, time
words = dict(w.split("=", 1) for w in sys.argv[1:])
run_dir = words["run_dir"].strip("'")
os.makedirs(run_dir, exist_ok=True)
with open(os.path.join(run_dir, "count"), "a") as f:
    f.write("x")
seed = words.get("seed", "0")
json.dump({"status": "running", "overrides": sys.argv[1:]}, open(os.path.join(run_dir, "status.json"), "w"))
if seed == "1":
    print("about to die")
    os.kill(os.getpid(), 9)
if seed == "9":
    print(os.getpid(), flush=True)
    open(os.path.join(run_dir, "pid"), "w").write(str(os.getpid()))
    time.sleep(600)
failed = seed == "2"
metrics = {} if failed else {"val_loss": 9.0 - int(seed), "evaluate": {"loss": 1.0 + int(seed), "curve": [1]}}
status = {"status": "failed" if failed else "done", "overrides": sys.argv[1:], "seconds": 0.5,
          "metrics": metrics, "error": "rank 1: out of luck" if failed else None}
json.dump(status, open(os.path.join(run_dir, "status.json"), "w"))
sys.exit(1 if failed else 0)
"""


@pytest.fixture
def command(tmp_path):
    script = tmp_path / "cell.py"
    script.write_text(CELL)
    return (sys.executable, str(script))


def run(folder: Path, command, *overrides: str) -> int:
    return sweep(Args(overrides, multirun=True, sweep_dir=folder), None, command)


def rows(folder: Path) -> list[list[str]]:
    with (folder / "summary.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_every_bad_cell_is_reported_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipes = ConfigFiles().options("recipe")
    assert main(["-m", "recipe=lm_single,lm_singel", "train.steps=1,0,x", "run_dir=y"]) == 2
    assert capsys.readouterr().err == (
        f"""error: 4 problems in this request; nothing was started

  run_dir = y: a sweep gives each cell its own folder
    set by: run_dir=y (command line)
    try:    sweep_dir=y

  train.steps = 0: should be at least 1
    set by: train.steps=0 (command line)

  train.steps = x: should be a whole number
    set by: train.steps=x (command line)

  recipe: unknown option 'lm_singel', did you mean 'lm_single'? (options: {", ".join(recipes)})
    set by: recipe=lm_singel (command line)
    try:    recipe=lm_single
"""
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_sweep_under_an_outer_launcher_is_refused(rank, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["-m", "seed=1,2"]) == 2
    text = """error: 1 problem in this request; nothing was started

  -m: a sweep cannot run under torchrun or srun (RANK is set): each cell starts its own ranks; \
run it outside: python -m launcher -m seed=1,2
"""
    assert capsys.readouterr().err == (text if rank == "0" else "")


def test_a_cell_that_fails_or_dies_is_recorded_and_the_rest_go_on(tmp_path, command, capfd):
    folder = tmp_path / "grid"
    assert run(folder, command, "recipe=lm_single", "seed=0,1,2,3") == 1
    head, *found = rows(folder)
    assert head == [
        "cell", "seed", "status", "val_loss", "evaluate.loss", "ranks", "planned_memory_mb", "planned_bubble",
        "seconds", "error",
    ]  # fmt: skip
    assert [row[:5] for row in found] == [
        ["0-0", "0", "done", "9.0", "1.0"],
        ["1-1", "1", "failed", "", ""],
        ["2-2", "2", "failed", "", ""],
        ["3-3", "3", "done", "6.0", "4.0"],
    ]
    assert [row[9] for row in found] == ["", "exit code -9: about to die", "rank 1: out of luck", ""]
    out = capfd.readouterr().out
    assert (
        """
  cell  seed  val_loss  status
  3     3     6         done
  0     0     9         done
  1     1               failed
  2     2               failed
  1-1: failed: exit code -9: about to die
  2-2: failed: rank 1: out of luck
best: 3-3, as a recipe in"""
        in out
    )
    again = f"to run the others again: -m sweep_dir={folder} and the same overrides"
    assert f"2 of 4 done, {folder}/summary.csv, report.html; {again}" in out


def test_the_same_folder_again_runs_only_what_is_missing_or_failed(tmp_path, command):
    folder = tmp_path / "grid"
    run(folder, command, "recipe=lm_single", "seed=0,2")
    assert run(folder, command, "recipe=lm_single", "seed=4,0,2") == 1
    ran = {p.parent.name: p.read_text() for p in folder.glob("*/count")}
    assert ran == {"0-0": "x", "1-2": "xx", "2-4": "x"}
    assert [row[0] for row in rows(folder)[1:]] == ["0-0", "1-2", "2-4"]


def test_other_settings_in_the_same_folder_never_reuse_a_cell(tmp_path, command):
    folder = tmp_path / "grid"
    assert run(folder, command, "recipe=lm_single", "seed=0,3") == 0
    assert run(folder, command, "recipe=lm_single", "seed=0,3", "train.steps=9") == 0
    assert sorted(p.parent.name for p in folder.glob("*/count")) == ["0-0", "1-3", "2-0", "3-3"]


def test_a_recipe_that_was_edited_is_not_mixed_with_the_results_of_the_old_one(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, words = Path("r.yaml"), ("recipe=r.yaml", "seed=0,3")
    recipe.write_text("defaults: [lm_single, _self_]\ntrain: {batch_size: 4}\n")
    assert run(Path("grid"), command, *words) == 0
    for cell, seed in (("0-0", 0), ("1-3", 3)):
        Path("grid", cell, "config.yaml").write_text(as_yaml(compose(["recipe=r.yaml", f"seed={seed}"]).data))
    assert run(Path("grid"), command, *words) == 0

    recipe.write_text("defaults: [lm_single, _self_]\ntrain: {batch_size: 2}\nlogger: {csv: true}\n")
    with pytest.raises(RequestError) as caught:
        run(Path("grid"), command, *words)
    (problem,) = caught.value.problems
    assert (problem.key, problem.text, problem.cure) == (
        "train.batch_size", "2: cell grid/0-0 has run with 4; its result is of another request", "sweep_dir=grid-2",
    )  # fmt: skip
    assert run(Path("grid-2"), command, *words) == 0


def test_secrets_are_not_written(tmp_path, command):
    folder = tmp_path / "grid"
    with pytest.raises(RequestError) as caught:
        run(folder, command, "logger.api_key=hunter2,hunter3")
    assert "hunter" not in str(caught.value)
    assert not folder.exists()


@contextmanager
def sweeping(tmp_path: Path, command) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a sweep in its own process.

    Its first cell sleeps; the process id of that cell is yielded, too.
    """
    script = tmp_path / "sweep.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom launcher.job.args import Args\n"
        "from launcher.extras.sweep.run_sweep import sweep\n"
        f"args = Args(('recipe=lm_single', 'seed=9,0'), multirun=True, sweep_dir=Path({str(tmp_path / 'grid')!r}))\n"
        f"sys.exit(sweep(args, None, {command!r}))\n"
    )
    root = Path(__file__).parents[3]
    child = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}
    )
    pid_file = tmp_path / "grid/0-9/pid"
    try:
        while not (pid_file.is_file() and pid_file.read_text()):
            assert child.poll() is None
        yield child, int(pid_file.read_text())
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize(
    ("how", "code"), [("SIGTERM", 75), *(pytest.param(*p, marks=exhaustive) for p in (("SIGHUP", 75), ("SIGINT", 130)))]
)
def test_a_sweep_that_is_told_to_stop_ends_its_cell_and_starts_no_other(how, code, tmp_path, command):
    with sweeping(tmp_path, command) as (child, pid):
        child.send_signal(getattr(signal, how))
        assert child.wait(300) == code
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    found = [(row[2], row[-1]) for row in rows(tmp_path / "grid")[1:]]
    assert ("interrupted", f"stopped by {how}") in found
    assert {row for row in found if row[0] != "done"} == {("interrupted", f"stopped by {how}")}
    assert json.loads((tmp_path / "grid/sweep.json").read_text()) == {
        "0-9": ["recipe=lm_single", "seed=9"],
        "1-0": ["recipe=lm_single", "seed=0"],
    }


def test_a_sweep_that_insists_does_not_wait_for_its_cell(tmp_path, command):
    script = tmp_path / "cell.py"
    script.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + script.read_text())
    with sweeping(tmp_path, command) as (child, pid):
        child.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        assert child.wait(300) == 75
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_sweep_that_is_killed_takes_its_cell_along(tmp_path, command):
    with sweeping(tmp_path, command) as (child, pid):
        cell = os.pidfd_open(pid)
        child.kill()
        child.wait()
        ready = select.poll()  # select() takes no file descriptor above 1023
        ready.register(cell, select.POLLIN)
        assert ready.poll(30_000)
        os.close(cell)


def test_a_cell_that_is_still_at_work_is_left_alone(tmp_path, command, monkeypatch):
    monkeypatch.setattr("launcher.extras.sweep.cell_process.SAVE_S", 0.1)
    cell = tmp_path / "grid/0-0"
    cell.mkdir(parents=True)
    (cell / "status.json").write_text('{"status": "running"}')
    with locked(cell):
        assert run(tmp_path / "grid", command, "recipe=lm_single", "seed=0,3") == 1
    told = f"another launcher is using it (process {os.getpid()} on {socket.gethostname()})"
    assert [(row[2], row[-1]) for row in rows(tmp_path / "grid")[1:]] == [("failed", told), ("done", "")]
    assert (cell / "status.json").read_text() == '{"status": "running"}'
    assert run(tmp_path / "grid", command, "recipe=lm_single", "seed=0,3") == 0


def test_a_sweep_that_slurm_runs_again_finds_its_folder(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def start(*overrides: str) -> list[str]:
        sweep(Args(overrides, multirun=True), None, command)
        return sorted(p.name for p in (tmp_path / "runs/sweeps").iterdir())

    assert start("recipe=lm_single", "seed=0,2") == ["0001"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert start("recipe=lm_single", "seed=0,2") == ["0001"]
    assert start("recipe=lm_single", "seed=0,3") == ["0001", "0002"]
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert start("recipe=lm_single", "seed=0,2") == ["0001", "0002", "0003"]
