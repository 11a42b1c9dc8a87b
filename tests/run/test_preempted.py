"""A run that is asked to stop saves where it is: all ranks agree on the step, and the same command resumes."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

import pytest

from launcher.__main__ import main
from launcher.parallel.grad_norm import Norm
from launcher.run import execute
from launcher.run import status_record as run_status
from launcher.runtime.run_folder import read_status
from launcher.runtime.training import save
from launcher.runtime.training.pipeline import PipelineRuntime
from launcher.steps import on_ranks
from tests.run.launching import TINY, checkpoints, losses, metrics, run, say, status, tensors
from tests.tiers import some

VALIDATED = ("train.eval_every=2", "checkpoint.every=null", "data.samples=640")  # four held-out batches


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight") / "run", *VALIDATED, steps=5)


def nth(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, n: int, rank: int, act: Callable[[], object]) -> None:
    """Call ``act`` on ``rank`` just before the ``n``-th call of a method."""
    before, seen = getattr(owner, name), []

    def call(*args: object, **named: object) -> object:
        seen.append(None)
        if (os.environ.get("RANK"), len(seen)) == (str(rank), n):
            act()
        return before(*args, **named)

    monkeypatch.setattr(owner, name, call)


LAUNCHER = os.getpid()
"""Runs are carried out in the process of the test, so this is the launcher."""


def launcher() -> int:
    return LAUNCHER


def ask(signum: int, whom: Callable[[], int] = os.getpid) -> Callable[[], object]:
    def act() -> None:
        os.kill(whom(), signum)
        time.sleep(0.2)  # the launcher passes it on

    return act


def held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask to stop in the second batch of the first validation, which is after step 2."""
    nth(monkeypatch, PipelineRuntime, "evaluate", 2, 1, ask(signal.SIGUSR2))


CASES = {
    "a rank in a step": (lambda m: nth(m, Norm, "squared_beside", 3, 2, ask(signal.SIGUSR1)), "SIGUSR1", 3, 75),
    "the terminal": (lambda m: nth(m, Norm, "squared_beside", 3, 1, ask(signal.SIGINT, launcher)), "SIGINT", 3, 130),
    "a hangup": (lambda m: nth(m, Norm, "squared_beside", 3, 3, ask(signal.SIGHUP, launcher)), "SIGHUP", 3, 75),
    "a validation": (held_out, "SIGUSR2", 2, 75),
}


@pytest.mark.parametrize(("when", "signum", "step", "code"), some(CASES.values(), 2), ids=some(CASES, 2))
def test_a_preempted_run_saves_and_the_same_command_resumes_it(
    when, signum, step, code, straight, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "run"
    command = [*TINY, f"run_dir={folder}", "train.steps=5", *VALIDATED]
    when(monkeypatch)
    assert main(command) == code
    monkeypatch.undo()
    told = f"preempted by {signum}: saved step-{step:06d}, from which the same command resumes"
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == told
    assert f"\nstopping after {step} steps\n" in said.out
    assert ("SIGTERM" in said.out + said.err) == (signum == "SIGTERM")
    assert {k: status(folder)[k] for k in ("status", "error")} == {"status": "preempted", "error": told}
    assert checkpoints(folder) == [f"step-{step:06d}"]
    assert main(command) == 0
    assert tensors(folder, 5) == tensors(straight, 5)
    rows = [{k: row.get(k) for k in ("step", "loss", "val_loss")} for row in metrics(folder)]
    assert rows == [{k: row.get(k) for k in ("step", "loss", "val_loss")} for row in metrics(straight)]


def test_a_second_signal_stops_at_once(tmp_path, monkeypatch, capsys, caplog):
    folder = tmp_path / "run"

    def twice() -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            os.kill(launcher(), signum)
            time.sleep(0.1)
        time.sleep(60)

    nth(monkeypatch, Norm, "squared_beside", 3, 1, twice)
    began = time.monotonic()
    assert main([*TINY, f"run_dir={folder}", "train.steps=5"]) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 30
    assert capsys.readouterr().err.splitlines() == ["stopped by SIGTERM"]
    told = "SIGTERM: stopping after a save; a second signal stops at once"
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [told]
    assert status(folder)["status"] == "interrupted"
    assert checkpoints(folder) == []


def test_before_the_first_step_there_is_nothing_to_save(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    monkeypatch.setattr(on_ranks, "_build_and_run_steps", asked_first(on_ranks._build_and_run_steps))
    assert main([*TINY, f"run_dir={folder}", "train.steps=5"]) == 75
    assert capsys.readouterr().err.splitlines()[-1] == "preempted by SIGTERM"
    assert (status(folder)["status"], checkpoints(folder)) == ("preempted", [])


def asked_first(work: Callable[..., object]) -> Callable[..., object]:
    def late(world: object, *args: object, **named: object) -> object:
        if os.environ["RANK"] == "3":
            os.kill(os.getpid(), signal.SIGTERM)
        return work(world, *args, **named)

    return late


def test_a_signal_when_all_is_done_stops_what_would_follow(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    command = [*TINY, f"run_dir={folder}", "train.steps=2", "steps=[train,save,transform]"]
    nth(monkeypatch, save.store, "commit", 1, 0, ask(signal.SIGTERM, launcher))
    assert main(command) == 75
    assert (status(folder)["status"], status(folder)["steps"]) == ("preempted", ["train", "save"])
    monkeypatch.undo()
    assert main(command) == 0
    assert status(folder)["steps"] == ["train", "save", "transform"]


def test_one_rank_in_this_process_saves_too(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    one = ["launch=inproc", "debug=onerank", "train.steps=5"]
    monkeypatch.setenv("RANK", "0")
    nth(monkeypatch, Norm, "squared_beside", 2, 0, ask(signal.SIGTERM))
    assert main([*TINY, *one, f"run_dir={folder}"]) == 75
    assert capsys.readouterr().err.splitlines()[-1].startswith("preempted by SIGTERM: saved step-000002,")
    monkeypatch.undo()
    assert main([*TINY, *one, f"run_dir={folder}"]) == 0
    assert len(losses(folder)) == 5


def test_a_job_that_slurm_runs_again_finds_its_folder(tmp_path, monkeypatch, capsys):
    command = [*TINY, f"runs={tmp_path}", "name=job", "train.steps=5", "checkpoint.resume=never"]
    with monkeypatch.context() as once:
        once.setenv("SLURM_JOB_ID", "77")
        nth(once, Norm, "squared_beside", 3, 2, ask(signal.SIGUSR1))
        assert main(command) == 75
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert main(command) == 0
    assert "resuming from step-000003, after 3 of 5 steps" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "job").iterdir()) == ["0001", "latest"]


@pytest.mark.parametrize(
    ("env", "config", "found"),
    [
        ({"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}, "a: 1\n", "0002"),
        ({"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "0"}, "a: 1\n", None),
        ({"SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": "1"}, "a: 1\n", None),
        ({"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}, "a: 2\n", None),
        ({"SLURM_RESTART_COUNT": "1"}, "a: 1\n", None),
    ],
    ids=["again", "the first start", "another job", "another request", "no job"],
)
def test_only_the_folder_of_this_request_of_this_job_is_taken(env, config, found, tmp_path, monkeypatch):
    for name in ("0001", "0002", "0003"):
        (tmp_path / name).mkdir()
    for name in ("0001", "0002"):
        (tmp_path / name / "config.yaml").write_text("a: 1\n")
        (tmp_path / name / "status.json").write_text('{"status": "preempted", "job": "slurm  77"}')
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert run_status.begun(tmp_path, config) == (None if found is None else tmp_path / found)


def test_the_next_start_says_that_the_one_before_was_killed_and_sets_the_status_right(tmp_path, capsys):
    folder = run(tmp_path / "run", steps=1)
    say(folder, status="running")  # killed after its last step, before it wrote its last status
    assert main([*TINY, f"run_dir={folder}", "train.steps=1"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"the previous start of this run was killed: {folder}",
        f"already done: {folder}",
    ]
    assert status(folder)["status"] == "done"


def test_a_signal_while_the_run_is_planned_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("launcher.run.run.plan_checked", lambda _: signal.raise_signal(signal.SIGUSR1))
    assert main([*TINY, f"run_dir={tmp_path}/run", "train.steps=5"]) == 75
    assert capsys.readouterr().err == "preempted by SIGUSR1\n"
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_is_deleted_is_told_at_once(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    nth(monkeypatch, Norm, "squared_beside", 2, 1, lambda: folder.rename(tmp_path / "elsewhere"))
    assert main([*TINY, f"run_dir={folder}", "train.steps=2000"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"error: {folder}: the run folder was deleted or moved during the run",
    ]
    assert not folder.exists()


def test_a_run_folder_that_is_moved_in_the_last_save_is_told_too(tmp_path, monkeypatch, capsys):
    """At that time the ranks send nothing any more."""
    folder, do = tmp_path / "run", execute.do

    def moved(run, *more):
        results = do(run, *more)
        folder.rename(tmp_path / "elsewhere")
        folder.mkdir()  # another folder in its place
        return results

    monkeypatch.setattr(execute, "do", moved)
    assert main([*TINY, f"run_dir={folder}", "train.steps=2"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {folder}: the run folder was deleted or moved during the run"
    )
    assert read_status(tmp_path / "elsewhere")["status"] == "failed"
    assert [*folder.iterdir()] == []


def test_the_status_of_a_run_whose_folder_is_moved_in_training_follows_it(tmp_path, monkeypatch, capsys):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"

    def move():
        folder.rename(elsewhere)
        folder.mkdir()  # someone else's folder in its place

    nth(monkeypatch, Norm, "squared_beside", 2, 1, move)
    assert main([*TINY, f"run_dir={folder}", "train.steps=2000"]) == 1
    line = f"{folder}: the run folder was deleted or moved during the run"
    assert capsys.readouterr().err.splitlines() == [f"error: {line}"]
    assert {key: read_status(elsewhere)[key] for key in ("status", "error")} == {"status": "failed", "error": line}
    assert [path.name for path in folder.iterdir()] == []
