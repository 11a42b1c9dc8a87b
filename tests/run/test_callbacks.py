"""Complete runs with callbacks: which events they get, on which ranks, how they stop a run, and how they fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher import Job, run_job
from launcher.__main__ import main
from launcher.runtime.faults import RanksFailed
from tests.run.launching import TINY, checkpoints, metrics, run, shape, steps

ALLOW = "security.allow=[tests]"
EVAL = ("train.eval_every=2", "train.eval_batches=1")


def diary(path: Path, kind: str = "Diary", **arguments: object) -> str:
    given = "".join(f", {name}: {value}" for name, value in arguments.items())
    return f"callbacks=[{{_target_: tests.run.callbacks.{kind}, path: {path}{given}}}]"


def logged_calls(path: Path, rank: int = 0) -> list[dict]:
    return [json.loads(line) for line in Path(f"{path}.{rank}").read_text().splitlines()]


@pytest.mark.parametrize("saves", ["false", "true"], ids=["save", "async save"])
def test_the_first_rank_tells_them_what_happens_in_order(tmp_path, saves):
    words = (diary(tmp_path / "diary"), ALLOW, *EVAL, "checkpoint.every=2", f"checkpoint.async={saves}")
    done = run(tmp_path / "run", *words, "checkpoint.keep=null")
    found = logged_calls(tmp_path / "diary")
    assert {line["rank"] for line in found} == {0}
    assert not list(tmp_path.glob("diary.1"))
    calls = [(line["hook"], line["step"]) for line in found if line["hook"] != "on_save"]
    assert calls == [
        ("on_start", 0), ("on_step", 1), ("on_step", 2), ("on_eval", 2), ("on_step", 3), ("on_step", 4), ("on_end", 4),
    ]  # fmt: skip
    rows = {row["step"]: row for row in metrics(done) if "loss" in row}
    for line in found:
        assert (line["steps"], line["folder"]) == (4, str(done))
        if line["hook"] == "on_step":
            row = rows[line["step"]]
            assert (line["loss"], line["lr"]) == (row["loss"], row["lr"])
            assert line["metrics"] == {name: row[name] for name in ("loss", "lr", "grad_norm")}
    (validated,) = (line for line in found if line["hook"] == "on_eval")
    assert validated["metrics"]["val_loss"] == next(row["val_loss"] for row in metrics(done) if "val_loss" in row)
    saved = [(line["checkpoint"], line["complete"]) for line in found if line["hook"] == "on_save"]
    assert saved == [("step-000002", True), ("step-000004", True)]


def test_a_class_that_says_so_is_called_on_every_rank_and_any_of_them_stops_all_with_a_checkpoint(tmp_path, capsys):
    words = (diary(tmp_path / "diary", "Everywhere", stop_at=3, rank=2), ALLOW, "steps=[train]", "schedule=constant")
    done = run(tmp_path / "run", *words, steps=9)
    for rank in range(4):
        calls = [line["hook"] for line in logged_calls(tmp_path / "diary", rank)]
        assert calls == ["on_start", "on_step", "on_step", "on_step", "on_save", "on_end"]
    assert (steps(done), checkpoints(done)) == ([1, 2, 3], ["step-000003"])
    assert "stopping after 3 of 9 steps: a callback requested it\n" in capsys.readouterr().out


@pytest.mark.parametrize(("hook", "step"), [("on_start", 0), ("on_step", 1), ("on_eval", 2), ("on_save", 4)])
def test_one_that_fails_names_itself_and_its_hook(tmp_path, capsys, hook, step):
    words = [*TINY, *shape(pp=2), diary(tmp_path / "diary", fails=hook), ALLOW, *EVAL]
    assert main([*words, "train.steps=4", f"run_dir={tmp_path}/run"]) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[0] == (
        f"error: rank 0: callbacks.0 tests.run.callbacks.Diary.{hook} failed after step {step}: "
        "KeyError: 'no such thing' (callbacks.py:30, in _write: raise KeyError(\"no such thing\"))"
    )


HOOKS = "on_start, on_step, on_eval, on_save, on_end"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("{_target_: tests.run.callbacks.Silent}", f"has no hook; the hooks are {HOOKS}"),
        (
            "{_target_: tests.run.callbacks.Misspelled}",
            "the launcher does not call its on_stpe, did you mean 'on_step'?",
        ),
        ("{_target_: tests.run.callbacks.Diary}", "its arguments do not fit: missing a required argument: 'path'"),
    ],
    ids=["no hook", "misspelt", "arguments"],
)
def test_callbacks_without_a_valid_hook_are_refused(tmp_path, capsys, typed, says):
    words = [*TINY, *shape(), f"callbacks=[{typed}]", ALLOW, "train.steps=4", f"run_dir={tmp_path}/run"]
    name = typed.split(": ")[1].rstrip("}")
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  callbacks.0._target_: {name}: {says}\n"
        f"    set by: callbacks=[{typed}] (command line)\n"
    )
    assert not (tmp_path / "run").exists()


def test_a_package_that_is_not_trusted_is_refused_and_nothing_is_imported(capsys):
    words = [*TINY, *shape(), "callbacks=[{_target_: nonesuch.Diary}]", "train.steps=4", "show=plan"]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  callbacks.0._target_: nonesuch.Diary: package 'nonesuch' is not trusted: there is no such package\n"
        "    set by: callbacks=[{_target_: nonesuch.Diary}] (command line)\n"
    )


def test_what_a_callback_changes_beside_the_training_is_noted_at_a_checkpoint(tmp_path, capsys):
    words = ("model=null", "model={_target_: tests.run.own.Warm}", ALLOW, *shape(), "schedule=constant")
    run(tmp_path / "run", *words, "callbacks=[{_target_: tests.run.callbacks.Warms}]")
    out = capsys.readouterr().out
    assert (
        "tests.run.own.WARMTH changed after the first step, by a forward or a callback; no checkpoint contains it, so "
        "a resumed run resets it; register it as a persistent buffer, or return it from get_extra_state\n"
        "callbacks.0 tests.run.callbacks.Warms has changed calls; no checkpoint contains it, so a resumed run "
        "resets it; if that matters, write it to a file in event.folder and read it in on_start\n"
    ) in out
    assert out.count("has changed calls") == 1


def test_a_callback_that_leaves_gradients_disabled_ends_the_run(tmp_path, capsys):
    words = [*TINY, *shape(), "callbacks=[{_target_: tests.run.callbacks.Disables}]", ALLOW, "train.steps=2"]
    assert main([*words, f"run_dir={tmp_path}/run"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == (
        "error: rank 0: gradients are disabled: a callback, the data, a metric or the optimizer has called "
        "torch.set_grad_enabled(False); write `with torch.no_grad():` instead"
    )


def test_one_that_sets_what_the_loss_uses_on_its_own_rank_ends_the_run(tmp_path):
    at = "tests.runtime.training.outside_nets"
    job = {
        "model": {"_target_": f"{at}.Net"}, "data": {"_target_": f"{at}.Samples"}, "loss": {"_target_": f"{at}.Loss"},
        "callbacks": [{"_target_": f"{at}.Sets"}], "security": {"allow": ["tests"]}, "optim": {"name": "sgd"},
        "schedule": {"name": "constant"}, "train": {"steps": 3, "batch_size": 4}, "steps": {"train": {}},
        "parallel": {"grid": {"dp_replicate": 2}}, "launch": {"nproc": 2, "device": "cpu"}, "name": "sets",
        "run_dir": f"{tmp_path}/run",
    }  # fmt: skip
    with pytest.raises(RanksFailed, match=f"Sets.on_step has set {at}.Loss.weight, which a forward or"):
        run_job(Job.model_validate(job))
