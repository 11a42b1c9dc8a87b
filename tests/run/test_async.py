"""``checkpoint.async``: training continues while a checkpoint is written, and no checkpoint or error is lost."""

from __future__ import annotations

import errno
import os
import signal
from threading import Event, current_thread, main_thread

import pytest

from launcher.__main__ import main
from launcher.checkpoint.write import RankWriter
from launcher.runtime.training import loop
from tests.run.launching import TINY, checkpoints, losses, metrics, run, status, tensors

EVERY = ("checkpoint.every=2", "checkpoint.keep=null")
ASYNC = (*EVERY, "checkpoint.async=true")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of six steps that waits for each checkpoint."""
    return run(tmp_path_factory.mktemp("straight") / "run", *EVERY, steps=6)


def in_step(monkeypatch, step, act):
    """Call ``act(rank)`` just before a rank writes its files of ``step``."""
    before = RankWriter.write

    def write(self, *rest):
        if f"{step:06d}" in self.folder.name:
            act(self.rank)
        return before(self, *rest)

    monkeypatch.setattr(RankWriter, "write", write)


def full(folder):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def test_what_the_thread_has_written_is_what_a_save_that_waits_writes(straight, tmp_path):
    folder = run(tmp_path / "run", *ASYNC, steps=6)
    assert checkpoints(folder) == checkpoints(straight) == ["step-000002", "step-000004", "step-000006"]
    for step in (2, 4, 6):
        assert tensors(folder, step) == tensors(straight, step)
    assert losses(folder) == losses(straight)
    stalls = [row["step"] for row in metrics(folder) if "save_stall_ms" in row]
    assert stalls == [row["step"] for row in metrics(straight) if "save_stall_ms" in row] == [3, 5]


def test_training_goes_on_while_the_thread_writes(straight, tmp_path, monkeypatch):
    """The write of step 2 ends only after step 3 has ended."""
    ahead, before, where = Event(), loop.step, []

    def step(s, clip, measuring):
        found = before(s, clip, measuring)
        if s.step == 2:
            ahead.set()
        return found

    def act(rank):
        where.append(current_thread() is main_thread())
        assert ahead.wait(300)
        assert where == [False]

    monkeypatch.setattr(loop, "step", step)
    in_step(monkeypatch, 2, act)
    folder = run(tmp_path / "run", *ASYNC, steps=6)
    assert tensors(folder, 2) == tensors(straight, 2)
    assert tensors(folder, 6) == tensors(straight, 6)


@pytest.mark.parametrize("step", [2, 4], ids=["the first", "the last"])
def test_a_write_that_fails_fails_the_run(step, straight, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    in_step(monkeypatch, step, lambda rank: full(folder / "x") if rank == 1 else None)
    command = [*TINY, f"run_dir={folder}", *ASYNC, "train.steps=6"]
    assert main(command) == 1
    told = f"checkpoint step-{step:06d} was not written: rank 1: {folder}/x: No space left on device"
    assert status(folder)["status"] == "failed"
    assert status(folder)["error"].partition(": ")[2] == told
    assert told in capsys.readouterr().err.splitlines()[0]
    assert checkpoints(folder) == ["step-000002"][: step // 4]


def test_a_write_that_fails_at_the_end_fails_the_run_too(tmp_path, monkeypatch, capsys):
    """The last write is still in progress when the last step ends."""
    folder = tmp_path / "run"
    in_step(monkeypatch, 2, lambda rank: full(folder / "x") if rank == 3 else None)
    monkeypatch.setattr("launcher.runtime.training.save_thread.Saver.check", lambda _: None)
    assert main([*TINY, f"run_dir={folder}", *ASYNC, "train.steps=3", "steps=[train]"]) == 1
    assert f"checkpoint step-000002 was not written: rank 3: {folder}/x: No space left" in capsys.readouterr().err
    assert checkpoints(folder) == []


def test_a_rank_killed_while_its_thread_writes_leaves_the_checkpoint_before(straight, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    in_step(monkeypatch, 4, lambda rank: os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None)
    command = [*TINY, f"run_dir={folder}", *ASYNC, "train.steps=6"]
    assert main(command) == 1
    monkeypatch.undo()
    assert "error: rank 1 was killed by SIGKILL" in capsys.readouterr().err
    assert (folder / "checkpoints/latest").read_text().startswith("step-000002\n")
    assert main(command) == 0
    assert "resuming from step-000002, after 2 of 6 steps" in capsys.readouterr().out
    for step in (2, 4, 6):
        assert tensors(folder, step) == tensors(straight, step)
    assert losses(folder) == losses(straight)
    assert checkpoints(folder) == checkpoints(straight)
