"""Cells that run in parallel: as many as requested, ended if they fall behind, none started after the time limit."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.errors import RequestError
from launcher.extras.sweep.cell_process import known_result
from launcher.extras.sweep.run_sweep import sweep
from launcher.job.args import parse
from launcher.job.sweep_grid import Cell
from launcher.runtime.run_folder import locked
from launcher.untrusted.files import LINK
from tests.extras.sweep.test_settings import LINE

# A cell that behaves as a run does. It writes when it was running, and its loss after each step is its lr.
CELL = """
import json, os, signal, sys, time
words = dict(w.split("=", 1) for w in sys.argv[1:])
run_dir = words["run_dir"].strip("'")
os.makedirs(run_dir, exist_ok=True)
lr, seed = float(words["optim.lr"]), int(words.get("seed", 0))
status = {"status": "preempted", "overrides": sys.argv[1:], "seconds": 0.1}
def say(**more):
    json.dump(status | more, open(os.path.join(run_dir, "status.json"), "w"))
def stop(*_):
    say()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
with open(os.path.join(run_dir, "metrics.jsonl"), "a") as f:
    print(json.dumps({"step": 1, "steps": 2, "loss": lr, "step_ms": 5.0}), file=f)
    print(json.dumps({"step": 1, "val_loss": lr}), file=f)
meet = os.path.join(os.path.dirname(run_dir), "meet")
if os.path.isdir(meet):  # whoever comes waits for another
    open(os.path.join(meet, words["optim.lr"]), "w").close()
    while len(os.listdir(meet)) < 2:
        time.sleep(0.02)
if lr > 8:  # until somebody says stop
    time.sleep(60)
say(status="done", metrics={"val_loss": lr + seed})
"""


@pytest.fixture
def command(tmp_path):
    script = tmp_path / "cell.py"
    script.write_text(CELL)
    return (sys.executable, str(script))


def run(folder: Path, command, *words: str) -> int:
    return sweep(parse(["-m", f"sweep_dir={folder}", *LINE[1:], *words]), None, command)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "summary.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def order(seed: int) -> list[str]:
    """Return the order in which a random sampler first proposes each rate."""
    from optuna import create_study, samplers
    from optuna.distributions import CategoricalDistribution

    from launcher.extras.sweep.optuna_sampler import STREAMS

    study, found = create_study(), []
    for number in range(60):
        study.sampler = samplers.RandomSampler(seed=seed * STREAMS + number)
        found.append(study.ask({"optim.lr": CategoricalDistribution(list("123459"))}).params["optim.lr"])
    return list(dict.fromkeys(found))


def test_two_cells_are_at_work_at_a_time(tmp_path, command):
    (tmp_path / "grid/meet").mkdir(parents=True)
    assert run(tmp_path / "grid", command, "optim.lr=1,2", "sweep.parallel=2") == 0


def test_cells_run_one_at_a_time_if_the_metric_is_a_speed(tmp_path, command, capfd):
    assert run(tmp_path / "grid", command, "optim.lr=1,2,3", "sweep.metric=step_ms") == 0
    told = capfd.readouterr().out.splitlines()
    assert [line.partition(" after")[0] for line in told[:6]] == [
        "0-1: running", "[1/3] 0-1: done", "1-2: running", "[2/3] 1-2: done", "2-3: running", "[3/3] 2-3: done",
    ]  # fmt: skip


def test_cells_of_the_same_run_get_the_result_of_the_first(tmp_path, command, capfd):
    same = ("optim.lr=1,2", "parallel.pipeline.scheduler=1f1b,gpipe", "parallel.pipeline.micro_batch_num=1")
    assert run(tmp_path / "grid", command, *same) == 0
    found = rows(tmp_path / "grid")
    assert [(row["status"], row["same_as"], row["val_loss"]) for row in found] == [
        ("done", "", "1.0"), ("done", "0-1-1f1b", "1.0"), ("done", "", "2.0"), ("done", "2-2-1f1b", "2.0"),
    ]  # fmt: skip
    assert "1-1-gpipe: the same run as 0-1-1f1b" in capfd.readouterr().out
    assert sorted(p.parent.name for p in (tmp_path / "grid").glob("*/status.json")) == ["0-1-1f1b", "2-2-1f1b"]


def test_cells_of_the_same_run_fail_together(tmp_path):
    script = tmp_path / "cell.py"
    script.write_text("import sys\nsys.exit('out of luck')\n")
    same = ("parallel.pipeline.scheduler=1f1b,gpipe", "parallel.pipeline.micro_batch_num=1")
    assert run(tmp_path / "grid", (sys.executable, str(script)), *same) == 1
    assert [(row["status"], row["same_as"]) for row in rows(tmp_path / "grid")] == [
        ("failed", ""), ("failed", "0-1f1b"),
    ]  # fmt: skip


def test_a_cell_that_is_behind_is_ended_and_not_begun_again(tmp_path, command, capfd):
    pytest.importorskip("optuna", reason="optuna is not installed")
    seed = next(seed for seed in range(1000) if order(seed)[-1] == "9")
    words = (
        "optim.lr=1,2,3,4,5,9", "sweep.sampler=random", "sweep.minutes=5", "sweep.prune=median", "train.eval_every=1",
        "sweep.parallel=1", f"sweep.seed={seed}",
    )  # fmt: skip
    folder = tmp_path / "grid"
    assert run(folder, command, *words) == 0
    found = {row["optim.lr"]: row["status"] for row in rows(folder)}
    assert found == {"9": "pruned", **dict.fromkeys("12345", "done")}
    why = "val_loss 9 at step 1 is worse than in other cells"
    (name,) = [row["cell"] for row in rows(folder) if row["status"] == "pruned"]
    assert json.loads((folder / "pruned.json").read_text()) == {name: why}
    assert f"  {name}: pruned: {why}" in capfd.readouterr().out
    assert run(folder, command, *words) == 0
    assert {row["optim.lr"]: row["status"] for row in rows(folder)} == found


def test_no_cell_begins_after_the_time_is_over(tmp_path, command, capfd):
    assert run(tmp_path / "grid", command, "optim.lr=1,2", "sweep.minutes=1e-9") == 0
    assert rows(tmp_path / "grid") == []
    told = capfd.readouterr().out
    assert f"; others have not started; to continue: -m sweep_dir={tmp_path}/grid and the same overrides\n" in told


def test_repeats_have_a_mean_and_a_spread(tmp_path, command):
    assert run(tmp_path / "grid", command, "optim.lr=3,1", "sweep.seeds=2", "seed=4") == 0
    found = rows(tmp_path / "grid")
    assert [row["cell"] for row in found] == ["0-3-seed4", "1-3-seed5", "2-1-seed4", "3-1-seed5"]
    assert [(row["val_loss_mean"], row["repeat"]) for row in found] == [
        ("7.5", "0"), ("7.5", "1"), ("5.5", "0"), ("5.5", "1"),
    ]  # fmt: skip
    assert {float(row["val_loss_spread"]) for row in found} == {0.5**0.5}


def test_each_seed_of_a_proposal_is_a_run_of_its_own(tmp_path, command):
    pytest.importorskip("optuna", reason="optuna is not installed")
    words = ("optim.lr=1,3", "sweep.sampler=random", "sweep.cells=2", "sweep.seeds=2", "seed=4", "sweep.minutes=1")
    assert run(tmp_path / "grid", command, *words) == 0
    found = rows(tmp_path / "grid")
    assert [(row["repeat"], row["status"]) for row in found] == 2 * [("0", "done"), ("1", "done")]
    assert {float(row["val_loss_spread"]) for row in found} == {0.5**0.5}


def test_the_best_cell_is_a_recipe_that_can_be_planned(tmp_path, command, capsys):
    run(tmp_path / "grid", command, "optim.lr=3,1,2", "model.dim=32")
    best = (tmp_path / "grid/best.yaml").read_text()
    assert best.startswith("# The best of a sweep: 1-1, val_loss 1.\n")
    capsys.readouterr()
    assert main([f"recipe={tmp_path / 'grid/best.yaml'}", "show=config"]) == 0
    told = capsys.readouterr().out
    assert "lr: 1.0" in told
    assert "dim: 32" in told
    assert main([f"recipe={tmp_path / 'grid/best.yaml'}", "show=plan"]) == 0


def test_two_sweeps_in_one_folder_are_one_too_many(tmp_path, command, capsys, monkeypatch):
    folder = tmp_path / "grid"
    folder.mkdir()
    with locked(folder):
        assert main(["-m", f"sweep_dir={folder}", *LINE[1:], "optim.lr=1,2"]) == 2
    told = capsys.readouterr().err
    assert f"  sweep_dir: {folder}: another launcher is using it (process {os.getpid()} on " in told
    assert not (folder / "summary.csv").exists()


LINKS = ["0-1.log", "0-1", "command.txt", "sweep.json", ".lock", "best.yaml", "summary.csv", "report.html", "job"]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_in_the_folder_of_a_sweep_is_refused_and_not_written_through(tmp_path, command, name):
    victim = tmp_path / "victim"
    victim.mkdir() if name == "0-1" else victim.write_text("precious")
    at = tmp_path / "grid"
    at.mkdir()
    (at / name).symlink_to(victim)
    with pytest.raises(RequestError) as caught:
        run(at, command, "optim.lr=1,2")
    (problem,) = caught.value.problems
    assert (problem.key, problem.text) == ("sweep_dir", f"{at} is not a sweep folder: {at / name}: {LINK}")
    assert [*at.iterdir()] == [at / name]
    assert not [*victim.iterdir()] if victim.is_dir() else victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["1-2.log", "1-2", "1-2/.lock"])
def test_a_link_that_is_made_while_a_sweep_runs_fails_its_cell_only(tmp_path, command, name):
    victim = tmp_path / "victim"
    victim.mkdir() if name == "1-2" else victim.write_text("precious")
    at = tmp_path / "grid"
    script = Path(command[1])
    above = f"os.makedirs({str((at / name).parent)!r}, exist_ok=True)"
    script.write_text(f"{CELL}\n{above}\nos.symlink({str(victim)!r}, {str(at / name)!r})\n")
    assert run(at, command, "optim.lr=1,2", "sweep.parallel=1") == 1
    first, second = rows(at)
    assert (first["status"], second["status"]) == ("done", "failed")
    assert second["error"] == f"{at / name}: {LINK}"
    assert not [*victim.iterdir()] if victim.is_dir() else victim.read_text() == "precious"


def test_a_status_that_is_a_link_is_no_result_of_its_cell(tmp_path):
    (tmp_path / "0-1").mkdir()
    (tmp_path / "theirs").write_text('{"status": "done", "overrides": ["seed=1"], "metrics": {"loss": 0.0}}')
    link = tmp_path / "0-1" / "status.json"
    link.symlink_to(tmp_path / "theirs")
    result = known_result(tmp_path, Cell("0-1", ("seed=1",), ()))
    assert result is not None
    assert (result.status, result.error, result.metrics) == ("failed", f"{link}: {LINK}", {})
