"""A setting that has changed since a checkpoint is refused (key, old and new value, cure), accepted, or noted."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from pathlib import Path

import pytest

from launcher.__main__ import main
from tests.checkpoint.saving import edit
from tests.run.launching import TINY, checkpoints, losses, run, say, shape, steps

ONE = (*TINY, *shape(), "schedule=constant")
NORMS = ("model={_target_: tests.run.own.Normalized, vocab: 64, dim: 16}", "security.allow=[tests]")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of two steps on one rank."""
    return run(tmp_path_factory.mktemp("trained") / "run", *ONE, "data.seq_len=4", "seed=3", steps=2)


@pytest.fixture
def path(trained) -> Path:
    return trained / "checkpoints/step-000002"


def resume_words(path: Path, *more: str) -> list[str]:
    return [*ONE, "train.steps=4", "data.seq_len=4", "seed=3", f"checkpoint.resume={path}", *more]


def plan(capsys, *words: str) -> str:
    assert main([*words, "show=plan"]) == 0
    return " ".join(capsys.readouterr().out.split())


def refusal(capsys, *words: str) -> str:
    """Return the refusal, which is the same for a plan and a run; nothing is written."""
    runs = Path("runs")
    assert main([*words, f"runs={runs}"]) == 2
    err = capsys.readouterr().err
    assert not runs.exists()
    assert main([*words, f"runs={runs}", "show=plan"]) == 2
    assert capsys.readouterr().err == err
    return err


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_everything_that_is_refused_is_told_at_once_by_key_and_its_cure_passes(path, capsys):
    words = resume_words(path, "seed=1", "train.batch_size=8", "data.seq_len=8")
    accept = "'checkpoint.accept_changes=[seed,data.seq_len,train.batch_size]'"
    assert (
        refusal(capsys, *words)
        == f"""\
error: 3 problems in this request; nothing was started

  seed = 1: {path} was trained with 3: other samples would follow, and other random numbers
    set by: seed=1 (command line)
    try:    seed=1 {accept}

  data.seq_len = 8: {path} was trained with 4: other samples would follow
    set by: data.seq_len=8 (command line)
    try:    data.seq_len=8 {accept}

  train.batch_size = 8: {path} was trained with 16: steps would use other samples
    set by: train.batch_size=8 (command line)
    try:    train.batch_size=8 {accept}
"""
    )
    said = plan(capsys, *words, *shlex.split(accept))
    for key, old, new in (("seed", 3, 1), ("data.seq_len", 4, 8), ("train.batch_size", 16, 8)):
        assert f" {key} {old} -> {new}: since step-000002; checkpoint.accept_changes allows it: " in said


CHANGED = {
    "a forgotten option": (
        ["model.rope_theta=500"],
        "model.rope_theta",
        "500.0: {path} was trained with 10000.0: the weights would continue in another model",
        "model.rope_theta=500 'checkpoint.accept_changes=[model.rope_theta]'",
    ),
    "half precision": (
        ["train.precision=bf16"],
        "train.precision",
        "bf16: {path} was trained with fp32: numbers would be rounded differently",
        "train.precision=bf16 'checkpoint.accept_changes=[train.precision]'",
    ),
    "overfitting": (
        ["debug=overfit"],
        "debug.overfit",
        "{new}: {path} was trained with null: other samples would follow",
        "'checkpoint.accept_changes=[debug.overfit]'",
    ),
    "sums": (
        ["parallel.pipeline.micro_batch_num=4", "parallel.pipeline.loss_reduction=sum"],
        "parallel.pipeline.loss_reduction",
        "4 times the mean gradient: {path} was trained with 1 times the mean gradient: steps would have another size",
        "parallel.pipeline.loss_reduction=sum 'checkpoint.accept_changes=[parallel.pipeline.loss_reduction]'",
    ),
    "sums over ranks": (
        [*shape(shard=2), "parallel.gradients_mean=false"],
        "parallel.gradients_mean",
        "2 times the mean gradient: {path} was trained with 1 times the mean gradient: steps would have another size",
        "parallel.gradients_mean=false 'checkpoint.accept_changes=[parallel.gradients_mean]'",
    ),
}


@pytest.mark.parametrize(("words", "key", "text", "cure"), CHANGED.values(), ids=CHANGED)
def test_a_change_is_refused_and_its_cure_passes(words, key, text, cure, path, capsys):
    err = refusal(capsys, *resume_words(path, *words))
    head, _, rest = err.partition("\n\n")
    assert head == "error: 1 problem in this request; nothing was started"
    told = rest.splitlines()[0].strip().removeprefix(key).lstrip(" =:")
    assert told == text.format(path=path, new=told.partition(":")[0])
    assert rest.splitlines()[-1] == f"    try:    {cure}"
    plan(capsys, *resume_words(path, *words), *shlex.split(cure))


def test_the_cure_restores_a_setting_that_was_forgotten(trained, capsys):
    words = [*ONE, "train.steps=4", f"run_dir={trained}", "data.seq_len=4"]
    before = sorted(p for p in trained.rglob("*") if p.name != ".lock")
    path = trained / "checkpoints/step-000002"
    assert main(words) == 2
    accept = "'checkpoint.accept_changes=[seed]'"
    why = f"{path} was trained with 3: other samples would follow, and other random numbers; {accept} allows the change"
    said = f"  seed = 0: {why}\n    set in: conf/config.yaml:"
    err = capsys.readouterr().err
    assert said in err
    assert err.endswith("\n    try:    seed=3\n")
    assert sorted(p for p in trained.rglob("*") if p.name != ".lock") == before
    plan(capsys, *words, "seed=3")


def test_common_changes_since_a_checkpoint_are_noted(path, capsys):
    words = resume_words(path, "optim.lr=0.5", "train.clip_norm=null", "optim.betas=[0.8,0.9]", "optim.weight_decay=0")
    said = plan(capsys, *words)
    assert " optim.lr 0.003 -> 0.5: since step-000002 " in f"{said} "
    assert " train.clip_norm 1.0 -> null: since step-000002" in said
    assert " optim.betas [0.9, 0.95] -> [0.8, 0.9]: since step-000002" in said
    assert " train.steps 2 -> 4: since step-000002" in said
    run(Path("there"), *words[len(TINY) :], steps=4)
    assert "optim.lr 0.003 -> 0.5: since step-000002" in Path("there/plan.txt").read_text()
    assert steps(Path("there")) == [3, 4]


def test_more_steps_of_a_schedule_that_ends_are_another_curve(path, capsys):
    more = "schedule.name constant -> cosine: since step-000002"
    said = plan(capsys, *resume_words(path, "schedule=cosine", "schedule.warmup_steps=1", "train.steps=101"))
    assert more in said
    assert (
        "train.steps 2 -> 101: since step-000002; schedule=cosine depends on the "
        "total number of steps, so the curve changes: step 3 is at 1 of optim.lr, on "
        "the old curve at 0.1"
    ) in said


OWN = ("schedule={_target_: tests.optim.own_schedules.InverseRoot, warmup: 3}", "security.allow=[tests]")
RESTARTS = ("schedule=cosine_restarts", "schedule.period_steps=9")


@pytest.mark.parametrize(("words", "key", "now"), [
    (OWN, "schedule._target_", "tests.optim.own_schedules.InverseRoot"),
    (RESTARTS, "schedule.name", "cosine_restarts"),
    (("schedule=wsd", "schedule.decay_share=0.5", "schedule.warmup_steps=1"), "schedule.name", "wsd"),
], ids=["own", "restarts", "decay"])  # fmt: skip
def test_another_schedule_is_noted_and_is_another_curve_only_where_it_is_drawn_over_all_steps(
    words, key, now, path, capsys
):
    said = plan(capsys, *resume_words(path, *words, "train.steps=101"))
    assert f"{key} constant -> {now}: since step-000002" in said
    curve = (
        "; schedule=wsd depends on the total number of steps, so the curve changes: "
        "step 3 is at 1 of optim.lr, on the old curve at 0"
    )
    assert f"{said} ".count(f"train.steps 2 -> 101: since step-000002{curve if now == 'wsd' else ''} ") == 1


FREE = [*shape(pp=2, shard=2), "parallel.pipeline.scheduler=gpipe", "parallel.pipeline.micro_batch_num=4"]
LATER = ["train.log_every=2", "train.eval_every=1", "checkpoint.every=1", "logger.csv=true", "name=other"]


@pytest.mark.parametrize("words", [FREE, LATER], ids=["layout", "aside"])
def test_layouts_and_what_no_number_hangs_on_are_free(words, path, capsys):
    notes = plan(capsys, *resume_words(path, *words)).partition(" notes ")[2]
    assert notes.count("since step-000002") == notes.count("train.steps 2 -> 4: since step-000002") == 1


def test_a_checkpoint_says_the_settings_of_what_trained_it_last(path, capsys):
    here = run(Path("there"), *resume_words(path, "seed=7", "checkpoint.accept_changes=[seed]")[len(TINY) :], steps=4)
    said = json.loads((here / "checkpoints/step-000004/state.json").read_text())["settings"]
    assert (said["seed"], said["data.seq_len"], said["train.steps"]) == (7, 4, 4)
    assert "was trained with 7: " in refusal(capsys, *resume_words(here / "checkpoints/step-000004"))


def test_a_loaded_checkpoint_is_compared_only_if_training_follows(path, capsys):
    words = [*resume_words(path)[:-1], f"steps.load.path={path}", "seed=1"]
    err = refusal(capsys, *words, "steps=[load,train,save]")
    assert f"  seed = 1: {path} was trained with 3: " in err
    assert "since" not in plan(capsys, *words, "steps=[load,evaluate]", "steps.evaluate.batches=1")


def test_where_nothing_is_trained_nothing_is_compared(path, capsys):
    assert "since" not in plan(capsys, *resume_words(path, "seed=1", "steps=[evaluate]", "steps.evaluate.batches=1"))
    assert "seed = 1" in refusal(capsys, *resume_words(path, "seed=1", "steps=[save]"))


def test_weights_that_nothing_has_trained_may_go_on_anyhow(capsys):
    run(Path("run"), *ONE, "steps=[save]")
    said = plan(capsys, *ONE, "train.steps=4", "seed=1", "checkpoint.resume=run/checkpoints/step-000000")
    assert "seed 0 -> 1: since step-000000, before any training" in said


def of_no_step(folder: Path, state: dict[str, object], capsys) -> str:
    before = {name: (folder / name).read_bytes() for name in ("state.json", "manifest.json")}
    data = json.dumps(state | {"step": "2"}).encode()
    record = {"size": len(data), "digest": hashlib.sha256(data).hexdigest(), "tensors": {}}
    (folder / "state.json").write_bytes(data)
    edit(folder, lambda d: d["files"].update({"state.json": record}))
    said = refusal(capsys, *resume_words(folder))
    for name, was in before.items():
        (folder / name).write_bytes(was)
    return said


def test_a_checkpoint_of_before_is_not_compared_and_that_is_said(trained, capsys):
    old = shutil.copytree(trained / "checkpoints/step-000002", Path("old/step-000002"))
    state = json.loads((old / "state.json").read_text())
    del state["settings"]
    (old / "state.json").write_text(json.dumps(state))
    data = (old / "state.json").read_bytes()
    record = {"size": len(data), "digest": hashlib.sha256(data).hexdigest(), "tensors": {}}
    edit(old, lambda d: d["files"].update({"state.json": record}))
    said = plan(capsys, *resume_words(old, "seed=1"))
    text = "the checkpoint is too old to say how it was trained, so nothing is compared"
    assert f" checkpoint {old}: {text}" in said
    assert "cannot resume from this checkpoint: it does not record its step\n" in of_no_step(old, state, capsys)
    state["settings"] = ["seed"]
    (old / "state.json").write_text(json.dumps(state))
    data = (old / "state.json").read_bytes()
    record |= {"size": len(data), "digest": hashlib.sha256(data).hexdigest()}
    edit(old, lambda d: d["files"].update({"state.json": record}))
    assert f"  {old}: its settings cannot be read\n" in refusal(capsys, *resume_words(old))


def test_samples_of_a_micro_batch_count_where_the_model_normalizes_over_them(capsys):
    words = [*TINY[2:], *NORMS, *shape(), "schedule=constant", "parallel.pipeline.micro_batch_num=1"]
    assert main([*words, "run_dir=run", "train.steps=2"]) == 0
    capsys.readouterr()
    path = Path("run/checkpoints/step-000002")
    words = [*words, f"checkpoint.resume={path}", "train.steps=4"]
    why = "the model's output depends on the samples of a micro batch"
    err = refusal(capsys, *words, "parallel.pipeline.micro_batch_num=2")
    assert (
        f"  parallel.pipeline.micro_batch_num: 2 micro batches of 8 samples: {path} was trained with "
        f"1 micro batch of 16 samples: {why}\n"
    ) in err
    plan(capsys, *words)


def test_a_name_that_no_setting_has_is_not_accepted(path, capsys):
    err = refusal(capsys, *resume_words(path, "checkpoint.accept_changes=[sed]"))
    assert (
        "  checkpoint.accept_changes: there is no setting 'sed', did you mean 'seed'?\n"
        "    set by: checkpoint.accept_changes=[sed] (command line)\n"
        "    try:    'checkpoint.accept_changes=[seed]'\n"
    ) in err


def test_a_checkpoint_that_is_not_on_this_machine_is_checked_at_the_start(capsys):
    said = plan(capsys, *resume_words(Path("nowhere/step-000002")))
    assert "checkpoint.resume nowhere/step-000002 is not on this machine; it is checked when the run starts" in said


def test_a_run_that_goes_on_behind_its_training_is_not_asked_again(trained, capsys):
    folder = shutil.copytree(trained, Path("run"))
    say(folder, status="running")
    words = [*ONE, f"run_dir={folder}", "train.steps=2", "data.seq_len=4", "seed=3"]
    assert main([*words, "steps=[train,save,verify]"]) == 0
    assert checkpoints(folder) == ["step-000002"]
    assert losses(folder) == losses(trained)


def test_a_newer_checkpoint_that_is_damaged_or_gone_is_told(trained, capsys):
    words = [*ONE, "run_dir=run", "data.seq_len=4", "seed=3", "train.steps=4"]
    folder = run(shutil.copytree(trained, Path("run")), *words[len(TINY) :], steps=4)
    say(folder, status="running", steps=[])
    newest = folder / "checkpoints/step-000004"
    manifest = newest / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"world": 1', '"world": 2'))
    why = f"{manifest}: damaged: its digest does not match its content"
    assert f"run_dir resumes from step-000002: {why}" in plan(capsys, *words)
    shutil.rmtree(newest)
    why = f"{folder}/checkpoints/latest names step-000004, which does not exist"
    assert f"run_dir resumes from step-000002: {why}" in plan(capsys, *words)
    run(folder, *words[len(TINY) :], steps=4)
    assert why in " ".join((folder / "plan.txt").read_text().split())
    assert "resuming from step-000002, after 2 of 4 steps" in capsys.readouterr().out
