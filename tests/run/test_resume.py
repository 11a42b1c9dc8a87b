"""Law 9: stop anywhere and resume; bit for bit in the same layout, with the same samples and losses in another."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from launcher.__main__ import main
from launcher.checkpoint.layout.strategy import single
from launcher.checkpoint.read import open_checkpoint, read_rank
from tests.run.launching import TINY, checkpoints, losses, metrics, run, say, shape, status, steps, tensors
from tests.tiers import exhaustive, some

TOLERANCE = {"fp32": 1e-6, "fp64": 1e-10}
LAYOUTS = {"one": {}, "4x1": {"pp": 4}, "1x4": {"shard": 4}, "2x1": {"pp": 2}, "replicas": {"replicate": 4}}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of six steps without a stop, with a checkpoint every two steps."""
    return run(tmp_path_factory.mktemp("straight") / "run", "checkpoint.every=2", "checkpoint.keep=null", steps=6)


@pytest.fixture(scope="module", params=["fp32", "fp64"])
def other(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "run"
    run(folder, f"train.precision={request.param}", "checkpoint.every=2", "checkpoint.keep=null", steps=6)
    return request.param, folder


def stopped(straight: Path, folder: Path, step: int) -> Path:
    """Return what ``straight`` would have left if it had been killed after the checkpoint of ``step``."""
    shutil.copytree(straight, folder)
    for name in checkpoints(folder):
        if name > f"step-{step:06d}":
            shutil.rmtree(folder / "checkpoints" / name)
    say(folder, status="running", steps=[], metrics={})
    return folder


def full_tensors(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Return every full tensor of a checkpoint: weights and optimizer state."""
    checkpoint = open_checkpoint(folder / "checkpoints" / f"step-{step:06d}")
    found = read_rank(checkpoint, single(checkpoint.strategy), 0)
    kinds = {"float32": np.float32, "float64": np.float64}
    return {n: np.frombuffer(b.data, kinds[b.dtype]).astype(np.float64) for n, b in found.items()}


@pytest.mark.parametrize("step", [2, 4])
def test_a_stopped_run_goes_on_to_the_same_bits(straight, tmp_path, step):
    folder = run(stopped(straight, tmp_path / "run", step), "checkpoint.every=2", "checkpoint.keep=null", steps=6)
    assert tensors(folder, 6) == tensors(straight, 6)
    assert losses(folder) == losses(straight)
    assert steps(folder) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("layout", some(LAYOUTS.values()), ids=some(LAYOUTS))
def test_in_another_layout_the_same_samples_follow(other, tmp_path, layout):
    precision, folder = other
    path = folder / "checkpoints" / "step-000002"
    more = [f"train.precision={precision}", f"checkpoint.resume={path}", "parallel.pipeline.micro_batch_num=4"]
    there = run(tmp_path / "run", *more, *shape(**layout), steps=6)
    assert steps(there) == [3, 4, 5, 6]
    assert losses(there) == pytest.approx(losses(folder)[2:], rel=TOLERANCE[precision])
    mine, theirs = full_tensors(there, 6), full_tensors(folder, 6)
    assert mine.keys() == theirs.keys()
    assert {n.split(".")[1] for n in mine if n.startswith("optim.")} == {"exp_avg", "exp_avg_sq", "step"}
    if precision == "fp64":  # Adam divides by numbers near zero: fp32 shows little here
        for name, expected in theirs.items():
            np.testing.assert_allclose(mine[name], expected, rtol=1e-7, atol=1e-13, err_msg=name)


def test_a_checkpoint_of_one_rank_goes_on_in_four(straight, tmp_path):
    run(tmp_path / "one", *shape(), steps=2)
    run(tmp_path / "four", f"checkpoint.resume={tmp_path}/one/checkpoints/step-000002", steps=6)
    assert losses(tmp_path / "four") == pytest.approx(losses(straight)[2:], rel=1e-5)


def test_more_steps_go_on_from_a_finished_run(tmp_path):
    run(tmp_path / "run", "schedule=constant", steps=2)
    run(tmp_path / "run", "schedule=constant", steps=4)
    run(tmp_path / "at once", "schedule=constant", steps=4)
    assert tensors(tmp_path / "run", 4) == tensors(tmp_path / "at once", 4)
    assert steps(tmp_path / "run") == [1, 2, 3, 4]


def test_a_finished_run_has_nothing_left_to_do(straight, tmp_path, capsys):
    folder = tmp_path / "run"
    run(folder, steps=2)
    own = {".lock", "console.log"}  # the second command adds its line to the copy of the console
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name not in own}
    capsys.readouterr()
    run(folder, steps=2)
    assert capsys.readouterr().out == f"already done: {folder}\n"
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name not in own} == before


def test_only_the_steps_that_are_left_are_done(tmp_path, capsys, monkeypatch):
    folder, more = tmp_path / "run", ["steps=[train,evaluate,save,transform,export]", "steps.evaluate.batches=1"]
    monkeypatch.setattr("launcher.steps.transform.run_on_files", broken)
    assert main([*TINY, f"run_dir={folder}", "train.steps=2", *more]) == 1
    assert capsys.readouterr().err == "error: transform: the disk is full\n"
    assert status(folder)["steps"] == ["train", "evaluate", "save"]
    monkeypatch.undo()
    rows = metrics(folder)
    run(folder, *more, steps=2)
    out = capsys.readouterr().out
    assert "save: " not in out
    assert "transform: step-000002 -> 1 rank" in out
    assert metrics(folder) == rows
    assert status(folder)["status"] == "done"
    assert status(folder)["metrics"]["export_gap"] < 1e-5


def broken(*_: object) -> None:
    raise OSError("the disk is full")


def test_an_evaluation_that_is_done_again_leaves_one_row(tmp_path, monkeypatch):
    folder, more = tmp_path / "run", ["steps=[train,save,evaluate]", "steps.evaluate.batches=1"]
    run(folder, *more, steps=2)
    rows = metrics(folder)
    (folder / "status.json").unlink()
    run(folder, *more, steps=2)
    assert [(r["step"], "val_loss" in r) for r in metrics(folder)] == [(1, False), (2, False), (2, True)]
    assert metrics(folder) == rows


def test_never_starts_from_the_beginning(straight, tmp_path):
    folder = stopped(straight, tmp_path / "run", 4)
    run(folder, "checkpoint.resume=never", steps=3)
    assert steps(folder) == [1, 2, 3]


def test_a_training_begun_anew_deletes_no_checkpoint_of_the_one_before(straight, tmp_path):
    folder = stopped(straight, tmp_path / "run", 6)
    before = {step: tensors(folder, step) for step in (2, 4, 6)}
    run(folder, "checkpoint.resume=never", "seed=1", "checkpoint.every=1", "checkpoint.keep=1", steps=3)
    assert checkpoints(folder) == ["step-000003", "step-000004", "step-000006"]
    replaced = folder / "checkpoints" / "replaced-step-000002"
    assert {str(p.relative_to(replaced)): p.read_bytes() for p in replaced.glob("rank_*/*")} == before[2]
    assert (tensors(folder, 4), tensors(folder, 6)) == (before[4], before[6])

    # after a resume, a run still owns the checkpoints that it saved before
    run(folder, "seed=1", "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.accept_changes=[train.steps]", steps=5)
    assert checkpoints(folder) == ["step-000005", "step-000006"]
    assert sorted(p.name for p in replaced.parent.glob("replaced-*")) == [replaced.name, "replaced-step-000004"]


def test_a_checkpoint_without_its_manifest_does_not_count(straight, tmp_path):
    folder = stopped(straight, tmp_path / "run", 4)
    (folder / "checkpoints" / "step-000004" / "manifest.json").unlink()
    run(folder, "checkpoint.every=2", "checkpoint.keep=null", steps=6)
    assert tensors(folder, 6) == tensors(straight, 6)
    assert losses(folder) == losses(straight)


def _half(state: Path) -> None:
    state.write_text("{")


def _empty(state: Path) -> None:
    state.write_text("")


def _negative(state: Path) -> None:
    state.write_text(state.read_text().replace('"step": 2', '"step": -2'))


def _folder(state: Path) -> None:
    state.unlink()
    state.mkdir()


def _other_types(state: Path) -> None:
    state.write_text("[]")


@pytest.mark.parametrize("damage", [_half, _empty, _negative, _folder, _other_types])
def test_a_run_whose_only_checkpoint_is_incomplete_is_refused(straight, tmp_path, capsys, damage):
    folder = stopped(straight, tmp_path / "run", 2)
    newest = folder / "checkpoints" / "step-000002"
    damage(newest / "state.json")
    before = sorted((p, p.stat().st_mtime_ns) for p in newest.rglob("*"))
    assert main([*TINY, f"run_dir={folder}", "train.steps=6"]) == 2
    err = capsys.readouterr().err
    assert f"run_dir: {folder}: cannot resume from this run folder: {newest}: incomplete checkpoint: state.json " in err
    assert "; restore that folder or move it away; checkpoint.resume=never starts a new training\n" in err
    assert sorted((p, p.stat().st_mtime_ns) for p in newest.rglob("*")) == before
    assert main(["status", str(folder)]) == 0
    assert f"\n{newest}: incomplete checkpoint: state.json " in capsys.readouterr().out


def test_an_older_checkpoint_is_used_with_a_line_and_the_newer_one_is_kept(straight, tmp_path, capsys):
    folder = stopped(straight, tmp_path / "run", 4)
    newest = folder / "checkpoints" / "step-000004"
    _half(newest / "state.json")
    run(folder, "checkpoint.every=2", "checkpoint.keep=null", steps=6)
    said = " ".join(capsys.readouterr().out.split())
    assert f"run_dir resumes from step-000002: {newest}: incomplete checkpoint: state.json has 1 bytes" in said
    assert tensors(folder, 6) == tensors(straight, 6)
    assert (folder / "checkpoints" / "replaced-step-000004" / "state.json").read_text() == "{"


def test_an_incomplete_checkpoint_that_is_named_is_refused(straight, tmp_path, capsys, monkeypatch):
    stopped(straight, tmp_path / "run", 4)
    monkeypatch.chdir(tmp_path)
    path, runs = Path("run/checkpoints/step-000004"), Path("runs")
    (path / "manifest.json").unlink()
    assert main([*TINY, f"runs={runs}", f"checkpoint.resume={path}"]) == 2
    assert (
        capsys.readouterr().err
        == f"""\
error: 1 problem in this request; nothing was started

  checkpoint.resume = {path}: cannot resume from this checkpoint: {path}: incomplete checkpoint: it has no \
manifest.json, which is written last
    set by: checkpoint.resume={path} (command line)
"""
    )
    assert not runs.exists()


def test_a_run_whose_only_checkpoint_is_damaged_does_not_begin_again(straight, tmp_path, capsys, monkeypatch):
    stopped(straight, tmp_path / "run", 4)
    monkeypatch.chdir(tmp_path)
    path = Path("run/checkpoints/step-000004")
    (path / "manifest.json").unlink()
    shutil.rmtree("run/checkpoints/step-000002")
    assert main([*TINY, "run_dir=run", "show=plan"]) == 2
    assert (
        f"  run_dir = run: cannot resume from this run folder: {path}: incomplete checkpoint: it has no manifest.json, "
        "which is written last; restore that folder or move it away; checkpoint.resume=never starts a new training\n"
    ) in capsys.readouterr().err
    assert main([*TINY, "run_dir=run", "checkpoint.resume=never", "show=plan"]) == 0


def test_a_checkpoint_of_another_model_is_refused(straight, tmp_path, capsys):
    path, runs = straight / "checkpoints" / "step-000002", tmp_path / "runs"
    assert main([*TINY, f"runs={runs}", f"checkpoint.resume={path}", "model=tied_pair", "model.dim=16"]) == 2
    assert f"  checkpoint.resume: {path} is of another model: the strategies do not match:\n" in capsys.readouterr().err
    assert not runs.exists()


def test_a_run_folder_of_another_model_is_refused(straight, tmp_path, capsys):
    folder = stopped(straight, tmp_path / "run", 4)
    before = (folder / "plan.txt").read_text()
    assert main([*TINY, f"run_dir={folder}", "model=tied_pair", "model.dim=16"]) == 2
    assert f"  run_dir: {folder}/checkpoints/step-000004 is of another model: " in capsys.readouterr().err
    assert (folder / "plan.txt").read_text() == before


def test_another_optimizer_is_refused(straight, tmp_path, capsys):
    path, runs = straight / "checkpoints" / "step-000002", tmp_path / "runs"
    assert main([*TINY, f"runs={runs}", f"checkpoint.resume={path}", "optim=momentum"]) == 2
    assert (
        capsys.readouterr().err
        == f"""\
error: 1 problem in this request; nothing was started

  optim.name = momentum: it keeps momentum_buffer for each parameter, but {path} has exp_avg, exp_avg_sq, step; \
checkpoint.resume=never starts from scratch
    set in: conf/optim/momentum.yaml:2:1
          | name: momentum
"""
    )
    assert not runs.exists()


def test_fewer_steps_than_the_checkpoint_has_seen_are_refused(straight, tmp_path, capsys):
    folder = stopped(straight, tmp_path / "run", 4)
    assert main([*TINY, f"run_dir={folder}", "train.steps=3"]) == 2
    assert (
        capsys.readouterr().err
        == f"""\
error: 1 problem in this request; nothing was started

  train.steps = 3: {folder}/checkpoints/step-000004 has already trained 4 steps
    set by: train.steps=3 (command line)
    try:    train.steps=4
"""
    )


def test_a_resumed_run_does_not_repeat_its_load_step(straight, tmp_path):
    path = straight / "checkpoints" / "step-000002"
    more = ["steps=[load,train,save]", f"steps.load.path={path}", "schedule=constant"]
    run(tmp_path / "run", *more, steps=3)
    run(tmp_path / "run", *more, steps=5)
    run(tmp_path / "at once", *more, steps=5)
    assert steps(tmp_path / "run") == [3, 4, 5]
    assert tensors(tmp_path / "run", 5) == tensors(tmp_path / "at once", 5)


GROUPS = ("optim.groups.embed.lr=0.01", "optim.groups.*norm={weight_decay: 1, lr: 0.002}")


@pytest.mark.parametrize(
    ("optim", "own"),
    [
        ("adamw", "optim.groups.layers.*.betas=[0.5,0.8]"),
        ("lion", "optim.groups.layers.*.betas=[0.5,0.8]"),
        ("sgd", "optim.groups.layers.*.momentum=0.5"),
        ("adafactor", "optim.groups.layers.*.d=2"),
        ("muon", "optim.groups.layers.*.momentum=0.5"),
    ],
    ids=["adamw", "lion", "sgd", "adafactor", "muon"],
)
def test_groups_of_parameters_go_on_to_the_same_bits_and_in_another_layout(tmp_path, optim, own):
    more = [f"optim={optim}", *GROUPS, own, "checkpoint.every=2", "checkpoint.keep=null", "train.precision=fp64"]
    straight = run(tmp_path / "straight", *more)
    again = run(stopped(straight, tmp_path / "again", 2), *more)
    assert tensors(again, 4) == tensors(straight, 4)
    warming_up = [0.003 * n / 20 for n in (1, 2, 3, 4)]
    assert [row["lr"] for row in metrics(again) if "loss" in row] == pytest.approx(
        warming_up
    )  # the warm-up to optim.lr

    resume = f"checkpoint.resume={straight}/checkpoints/step-000002"
    there = run(tmp_path / "there", *more, resume, "parallel.pipeline.micro_batch_num=4", *shape(pp=1))
    assert losses(there) == pytest.approx(losses(straight)[2:], rel=1e-10)


@pytest.mark.parametrize("optim", ["adafactor", "muon"])
def test_rows_columns_and_matrices_move_between_layouts_and_through_a_transform(tmp_path, optim):
    more = [f"optim={optim}", "train.precision=fp64", "schedule=constant", "data.vocab_size=63"]
    transform = ["steps=[train,save,transform]", "steps.transform.nproc=4", "steps.transform.shard_size=4"]
    begun = run(tmp_path / "begun", *more, *shape(pp=2, shard=2), *transform, steps=2)
    straight = run(tmp_path / "straight", *more, *shape(), "parallel.pipeline.micro_batch_num=4")
    for name, source, layout in (
        ("alone", "checkpoints/step-000002", shape()), ("four", "transformed", shape(shard=4)),
        ("again", "checkpoints/step-000002", shape(pp=2, shard=2)),
    ):  # fmt: skip
        there = run(tmp_path / name, *more, *layout, f"checkpoint.resume={begun}/{source}")
        assert losses(there) == pytest.approx(losses(straight)[2:], rel=1e-10)
    kept = open_checkpoint(begun / "transformed").strategy.only("optim").entries
    if optim == "adafactor":
        row, column = kept["optim.row_var.embed.weight"].layout, kept["optim.col_var.embed.weight"].layout
        assert (row.shape, row.split) == ((63, 1), (("dp_shard",), ()))
        assert (column.shape, column.split) == ((1, 16), ((), ()))


def test_a_parameter_that_changes_between_muon_and_adamw_is_refused(tmp_path, capsys):
    folder = run(tmp_path / "run", "optim=muon", *shape(), "schedule=constant", steps=1)
    words = [*TINY, "optim=muon", *shape(), "schedule=constant", f"run_dir={folder}", "train.steps=2"]
    assert main([*words, "optim.groups.layers.0.use=adamw"]) == 2
    told = "adamw updates layers.0.attn.q.weight, but {}/checkpoints/step-000001 has muon's momentum_buffer for it"
    assert (
        f"optim.groups: {told.format(folder)}; checkpoint.resume=never starts from scratch" in capsys.readouterr().err
    )


def test_other_groups_since_the_checkpoint_are_noted(straight, tmp_path, capsys):
    folder = stopped(straight, tmp_path / "run", 4)
    run(folder, "optim.groups.embed.lr=0.01", "checkpoint.every=2", steps=6)
    text = 'optim.groups {} -> {"embed": {"lr": 0.01}}: since step-000004'
    assert text in (folder / "plan.txt").read_text() + capsys.readouterr().out


@exhaustive
def test_momentum_and_plain_sgd_go_on_too(tmp_path):
    for optim in (["optim=momentum", "optim.lr=0.01"], ["optim=sgd", "optim.lr=0.01"]):
        more, name = [*optim, "schedule=constant"], optim[0].partition("=")[2]
        run(tmp_path / name, *more, steps=2)
        run(tmp_path / name, *more, steps=4)
        run(tmp_path / f"{name} at once", *more, steps=4)
        assert tensors(tmp_path / name, 4) == tensors(tmp_path / f"{name} at once", 4)


def test_training_may_go_on_from_weights_alone(tmp_path):
    run(tmp_path / "run", "steps=[save]")
    run(tmp_path / "run", steps=2)
    run(tmp_path / "straight", steps=2)
    assert tensors(tmp_path / "run", 2) == tensors(tmp_path / "straight", 2)


@pytest.mark.parametrize("layout", [shape(), shape(shard=2)], ids=["one", "two"])
def test_unused_parameters_and_dropout_go_on_to_the_same_bits(tmp_path, layout):
    own = ["model={_target_: tests.run.own.Spare, vocab: 64, dim: 16}", "security.allow=[tests]"]
    more = [*TINY[2:], *own, *layout, "schedule=constant"]
    for folder, n in (("run", 2), ("run", 4), ("at once", 4)):
        assert main([*more, f"run_dir={tmp_path / folder}", f"train.steps={n}"]) == 0
    assert tensors(tmp_path / "run", 4) == tensors(tmp_path / "at once", 4)
    assert losses(tmp_path / "run") == losses(tmp_path / "at once")


def test_names_with_an_at_sign_go_on_to_the_same_bits(tmp_path):
    own = ["model={_target_: tests.run.own.Addressed, vocab: 64, dim: 16}", "security.allow=[tests]"]
    more = [*TINY[2:], *own, *shape(shard=2), "schedule=constant", "parallel.local_norm.print=true"]
    for folder, n in (("run", 2), ("run", 4), ("at once", 4)):
        assert main([*more, f"run_dir={tmp_path / folder}", f"train.steps={n}"]) == 0
    assert tensors(tmp_path / "run", 4) == tensors(tmp_path / "at once", 4)
    assert losses(tmp_path / "run") == losses(tmp_path / "at once")


TP = ("operators=sequence", "parallel.grid.tp=2", "launch.nproc=4", "train.precision=fp64", "checkpoint.every=2")


@pytest.mark.parametrize("other", ["fp64"], indirect=True)
def test_stages_go_on_in_operators_over_tp_and_back_with_the_same_samples(other, tmp_path):
    _, straight = other
    stages = ["parallel.pipeline.stages=1", "parallel.hsdp={shard_size: 2, threshold: 0}"]
    mine = ["parallel.pipeline.micro_batch_num=4", "checkpoint.keep=null"]
    path = f"checkpoint.resume={straight}/checkpoints/step-000002"
    there = run(tmp_path / "tp", path, *TP, *stages, *mine, steps=6)
    assert losses(there) == pytest.approx(losses(straight)[2:], rel=1e-10)
    again = run(stopped(there, tmp_path / "again", 4), *TP, *stages, *mine, steps=6)
    assert tensors(again, 6) == tensors(there, 6)
    assert losses(again) == losses(there)
    path = f"checkpoint.resume={there}/checkpoints/step-000004"
    back = run(tmp_path / "back", path, "train.precision=fp64", "parallel.pipeline.micro_batch_num=4", steps=6)
    assert losses(back) == pytest.approx(losses(straight)[4:], rel=1e-10)
    for name, expected in full_tensors(straight, 6).items():
        np.testing.assert_allclose(full_tensors(there, 6)[name], expected, rtol=1e-7, atol=1e-13, err_msg=name)
