"""Complete runs with a user's own optimizer class."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.checkpoint.read import open_checkpoint
from tests.run.launching import TINY, checkpoints, losses, run, shape, tensors

OWN = ("security.allow=[tests]", "train.precision=fp64", "checkpoint.every=2", "checkpoint.keep=null")
INT_STEP = "optim={_target_: tests.optim.theirs.IntStep, lr: 0.01}"
COUNTER = "optim={_target_: tests.optim.theirs.CounterInGroup, lr: 0.1}"


def stopped(straight: Path, folder: Path) -> Path:
    """Return the folder of a run that was killed after two of its four steps."""
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "checkpoints" / checkpoints(folder)[-1])
    (folder / "status.json").write_text('{"status": "running", "steps": [], "metrics": {}, "seconds": 0}')
    return folder


@pytest.mark.parametrize(
    ("own", "pipe"),
    [(INT_STEP, "1f1b"), (COUNTER, "zero_bubble_v")],
    ids=["numbers in the state", "numbers in the groups, tied weights twice on a rank"],
)
def test_numbers_that_are_no_tensors_go_on_bit_for_bit_and_in_another_layout(tmp_path, own, pipe):
    more = (own, *OWN, f"parallel.pipeline.scheduler={pipe}")
    straight = run(tmp_path / "straight", *more)
    again = run(stopped(straight, tmp_path / "again"), *more)
    assert tensors(again, 4) == tensors(straight, 4)
    resume = f"checkpoint.resume={straight}/checkpoints/step-000002"
    there = run(tmp_path / "there", own, *OWN, resume, "parallel.pipeline.micro_batch_num=4", *shape(pp=1))
    assert losses(there) == pytest.approx(losses(straight)[2:], rel=1e-10)


def test_groups_are_refused_for_it_where_it_has_no_such_argument(tmp_path, capsys):
    own = "optim={_target_: tests.optim.theirs.IntStep, lr: 0.01, groups: {embed: {lr: 1}}}"
    assert main([*TINY, f"run_dir={tmp_path}/run", own, *OWN]) == 2
    assert capsys.readouterr().err.splitlines()[2] == (
        "  optim.groups: tests.optim.theirs.IntStep: your own class gets its parameters in one list and has no "
        "argument groups; groups work with optim=adafactor, adamw, lion, momentum, muon and sgd"
    )


def test_checkpoints_of_a_users_optimizer_pass_every_verb(tmp_path, capsys):
    steps = "steps=[train,save,load,broadcast,transform,verify,inspect]"
    folder = run(tmp_path / "run", INT_STEP, *OWN, "parallel.grid.dp_replicate=2", steps, *shape(replicate=2), steps=2)
    out = capsys.readouterr().out
    assert "all digests agree" in out
    assert "broken" not in out
    saved = open_checkpoint(folder / "checkpoints" / "step-000002").strategy
    names = {n.split(".")[1] for n in saved.only("optim").entries}
    assert names == {"step/int", "power/float", "even/bool", "last/list", "last/0/float", "last/1/tuple",
                     "last/1/0/int", "last/1/1/none", "none/none", "m", "v"}  # fmt: skip


def test_a_checkpoint_of_an_optimizer_that_keeps_other_things_is_refused(tmp_path, capsys):
    folder = run(tmp_path / "run", INT_STEP, *OWN, *shape(), steps=2)
    capsys.readouterr()
    rms = "optim={_target_: torch.optim.RMSprop}"
    words = [*TINY, rms, "security.allow=[tests,torch]", "train.precision=fp64", f"run_dir={folder}", "train.steps=4"]
    assert main([*words, *shape()]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  optim._target_ = torch.optim.RMSprop: it keeps square_avg, step for each parameter, but "
        f"{folder}/checkpoints/step-000002 has even, last, m, none, power, step, v; "
        "checkpoint.resume=never starts from scratch\n"
        "    set by: optim={_target_: torch.optim.RMSprop} (command line)\n"
    )


def test_state_that_a_class_begins_with_stays_where_a_checkpoint_has_none(tmp_path):
    plain = run(tmp_path / "plain", "optim=sgd", *OWN, *shape(), steps=2)
    adagrad = ("optim={_target_: torch.optim.Adagrad}", "security.allow=[torch]", "train.precision=fp64",
               "checkpoint.accept_changes=[optim._target_]")  # fmt: skip
    there = run(tmp_path / "there", *adagrad, f"checkpoint.resume={plain}/checkpoints/step-000002", *shape(shard=2))
    assert len(losses(there)) == 2


def test_show_plan_refuses_it_and_starts_nothing(tmp_path, capsys):
    words = [*TINY, "optim={_target_: torch.optim.LBFGS}", "security.allow=[torch]", f"run_dir={tmp_path}/run"]
    assert main([*words, "show=plan"]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  optim._target_ = torch.optim.LBFGS: its step() needs closure, but loss and gradients are computed "
        "once, before step()\n"
        "    set by: optim={_target_: torch.optim.LBFGS} (command line)\n"
    )
    assert not (tmp_path / "run").exists()


def test_the_plan_says_what_it_does(tmp_path, capsys):
    words = [*TINY, "optim={_target_: torch.optim.Adafactor}", "security.allow=[torch]", *shape(pp=2)]
    assert main([*words, "show=plan"]) == 0
    note = "optim._target_ torch.optim.Adafactor updates one full tensor at a time (seen on small tensors)"
    assert note in capsys.readouterr().out
