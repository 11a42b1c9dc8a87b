"""A rank or the launcher dies at the worst moment: what is left is complete, and the same command resumes from it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from torch import Tensor

from launcher.__main__ import main
from launcher.checkpoint import store
from launcher.checkpoint.store import complete
from launcher.checkpoint.tensorfile.safetensors import read_header
from launcher.checkpoint.write import RankWriter
from launcher.parallel.grad_norm import Norm
from launcher.runtime.training.session import Session
from tests.checkpoint.test_verify import flip
from tests.run.launching import (
    TINY,
    checkpoints,
    ended,
    losses,
    ranks,
    reached,
    run,
    started,
    status,
    steps,
    tensors,
    until,
)  # fmt: skip
from tests.tiers import exhaustive

LONG = 36
EVERY = ("checkpoint.every=2", "checkpoint.keep=null")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight") / "run", *EVERY, steps=8)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mid_step(monkeypatch: pytest.MonkeyPatch, damaging: Path | None = None) -> None:
    """Rank 2 dies in its fifth step, between the backward and the optimizer's step.

    ``damaging``: a checkpoint that is damaged just before.
    """
    before, seen = Norm.squared_beside, []

    def squared(self: Norm, number: Tensor) -> object:
        seen.append(None)
        if os.environ["RANK"] == "2" and len(seen) == 5:
            if damaging is not None:
                file = damaging / "rank_1/model.safetensors"
                flip(file, next(iter(read_header(file).entries)))
            die()
        return before(self, number)

    monkeypatch.setattr(Norm, "squared_beside", squared)


def mid_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 dies after it has written its files of step 4, before it reports them."""
    before = RankWriter.write

    def write(self, *rest):
        record = before(self, *rest)
        if self.rank == 1 and "000004" in self.folder.name:
            die()
        return record

    monkeypatch.setattr(RankWriter, "write", write)


def mid_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 dies after the manifest of step 4 is written, before the folder is renamed to its final name."""

    def publish(new, final):
        if "000004" in final.name:
            die()
        new.rename(final)

    monkeypatch.setattr(store, "publish", publish)


@pytest.mark.parametrize(
    ("when", "rank", "last"),
    [(mid_step, 2, 4), pytest.param(mid_write, 1, 2, marks=exhaustive), (mid_commit, 0, 2)],
    ids=["in a step", "in a write", "in a commit"],
)
def test_a_killed_rank_is_named_and_costs_only_time(when, rank, last, straight, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    command = [*TINY, f"run_dir={folder}", "train.steps=8", *EVERY]
    when(monkeypatch)
    assert main(command) == 1
    monkeypatch.undo()
    told = f"rank {rank} was killed by SIGKILL (out of memory? see dmesg)"
    err = capsys.readouterr().err.splitlines()
    assert err[0] == f"error: {told}"
    assert err[-1] == f"log: {folder}/logs/rank{rank}.log"
    assert {k: status(folder)[k] for k in ("status", "error")} == {"status": "failed", "error": told}
    assert json.loads((folder / f"errors/rank{rank}.json").read_text())["type"] == "SIGKILL"
    assert [n for n in checkpoints(folder) if complete(folder / "checkpoints" / n) and "." not in n][
        -1
    ] == f"step-{last:06d}"
    assert main(command) == 0
    assert f"resuming from step-{last:06d}, after {last} of 8 steps" in capsys.readouterr().out
    assert tensors(folder, 8) == tensors(straight, 8)
    assert losses(folder) == losses(straight)
    assert checkpoints(folder) == checkpoints(straight)
    assert not list(folder.glob("errors/*"))


def test_a_restart_goes_on_from_what_the_attempt_before_has_saved(straight, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    mid_step(monkeypatch)
    before = Session.__init__

    def heal(self, world, *rest, **named):
        if world.attempt:
            monkeypatch.undo()
        before(self, world, *rest, **named)

    monkeypatch.setattr(Session, "__init__", heal)
    assert main([*TINY, f"run_dir={folder}", "train.steps=8", *EVERY, "launch.max_restarts=1"]) == 0
    assert "resuming from step-000004, after 4 of 8 steps" in capsys.readouterr().out
    assert tensors(folder, 8) == tensors(straight, 8)
    assert losses(folder) == losses(straight)
    assert steps(folder) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("named", [False, True], ids=["from scratch", "from a named checkpoint"])
def test_a_restart_beside_another_training_passes_over_a_damaged_checkpoint(
    named, straight, tmp_path, monkeypatch, capsys
):
    folder = run(tmp_path / "run", *EVERY, "seed=7", steps=2)
    start = straight / "checkpoints/step-000002"
    last = "step-000006" if named else "step-000004"
    mid_step(monkeypatch, damaging=folder / "checkpoints" / last)
    before = Session.__init__

    def heal(self, world, *rest, **more):
        if world.attempt:
            monkeypatch.undo()
        before(self, world, *rest, **more)

    monkeypatch.setattr(Session, "__init__", heal)
    capsys.readouterr()
    words = [f"checkpoint.resume={start if named else 'never'}", "launch.max_restarts=1"]
    assert main([*TINY, f"run_dir={folder}", "train.steps=8", *EVERY, *words]) == 0

    told = capsys.readouterr().out.splitlines()
    at = next(n for n, line in enumerate(told) if line.startswith(f"{last} is damaged and skipped: "))
    goes_on = f"this attempt starts from {start}" if named else "training starts again"
    assert told[at + 1] == f"older checkpoints in the folder may belong to another training: {goes_on}"
    assert tensors(folder, 8) == tensors(straight, 8)
    assert losses(folder)[2:] == losses(straight)[2:]  # the rows of steps 1 and 2 may be of the other training


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A run with enough steps to be interrupted."""
    return run(tmp_path_factory.mktemp("long") / "run", *EVERY, steps=LONG)


def test_the_launcher_itself_may_be_killed(long, tmp_path):
    folder, n = tmp_path / "run", LONG
    with started(folder, *EVERY, steps=n) as process:
        until(reached(folder, 3), process)
        alive = ranks(process)
        process.kill()
        assert process.wait(300) == -signal.SIGKILL
    assert len(alive) == 4
    run(folder, *EVERY, steps=n)  # start at once: it waits for ranks that are still ending
    assert all(ended(pid, 0) for pid in alive)
    assert tensors(folder, n) == tensors(long, n)
    assert losses(folder) == losses(long)


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGUSR2, marks=exhaustive)], ids=lambda s: s.name
)
def test_a_signal_ends_every_rank_at_once_where_nothing_is_to_be_saved(signum, long, tmp_path):
    folder, n = tmp_path / "run", LONG
    with started(folder, *EVERY, "launch.signal_save=false", steps=n) as process:
        until(reached(folder, 3), process)
        alive = ranks(process)
        process.send_signal(signum)
        assert process.wait(300) == 128 + signum
        assert all(ended(pid, within_s=0) for pid in alive)
    assert folder.with_suffix(".log").read_text().endswith(f"\nstopped by {signum.name}\n")
    assert {k: status(folder)[k] for k in ("status", "error")} == {
        "status": "interrupted",
        "error": f"stopped by {signum.name}",
    }
    done = int(re.findall(r"\d+", checkpoints(folder)[-1])[0])
    assert 2 <= done < n
    run(folder, *EVERY, "launch.signal_save=false", steps=n)
    assert tensors(folder, n) == tensors(long, n)
    assert steps(folder) == list(range(1, n + 1))
    assert status(folder)["status"] == "done"


def test_a_loss_that_is_no_number_names_its_step_and_leaves_the_weights(straight, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    before, seen = Norm.squared_beside, []

    def squared(self: Norm, number: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(None)
        share, square = before(self, number)
        return share, square * (float("nan") if len(seen) == 5 else 1.0)

    monkeypatch.setattr(Norm, "squared_beside", squared)
    assert main([*TINY, f"run_dir={folder}", "train.steps=8", *EVERY]) == 1
    monkeypatch.undo()
    loss = losses(straight)[4]
    text = (
        f"step 5: the loss is {loss} and the gradient norm nan; the weights were not changed. "
        "Lower optim.lr, lengthen schedule.warmup_steps, or look at the data of this step"
    )
    assert re.fullmatch(r"rank \d: (.*)", status(folder)["error"])[1] == text
    err = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: rank \d: (.*)", err[0])[1] == text
    assert re.fullmatch(r"also failed, the same way: ranks \d, \d, \d", err[1])
    assert re.fullmatch(rf"log: {folder}/logs/rank\d.log", err[2])
    assert steps(folder) == [1, 2, 3, 4]
    assert main([*TINY, f"run_dir={folder}", "train.steps=8", *EVERY]) == 0
    assert tensors(folder, 8) == tensors(straight, 8)


def test_a_signal_between_the_ranks_and_the_end_is_heard_too(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    monkeypatch.setattr("launcher.steps.transform.run_on_files", lambda *_: signal.raise_signal(signal.SIGTERM))
    command = [*TINY, f"run_dir={folder}", "train.steps=1", "steps=[train,save,transform]"]
    assert main(command) == 75
    assert capsys.readouterr().err == "preempted by SIGTERM\n"
    assert (status(folder)["status"], status(folder)["steps"]) == ("preempted", ["train", "save"])
    monkeypatch.undo()
    assert main(command) == 0
    assert status(folder)["status"] == "done"
