"""Complete runs with a user's own learning-rate schedule."""

from __future__ import annotations

import pytest

from launcher.__main__ import main
from tests.run.launching import TINY, metrics, run, shape, tensors

OWN = ("schedule={_target_: tests.optim.own_schedules.InverseRoot, warmup: 2}", "security.allow=[tests]")
SAVES = ("train.precision=fp64", "checkpoint.every=2", "checkpoint.keep=null", "optim.lr=0.01")


def test_a_users_schedule_sets_every_rate_and_a_resume_is_bit_for_bit(tmp_path):
    straight = run(tmp_path / "straight", *OWN, *SAVES)
    assert [row["lr"] for row in metrics(straight)] == pytest.approx(
        [0.005, 0.01, 0.01 * (2 / 3) ** 0.5, 0.01 * 0.5**0.5]
    )
    resume = f"checkpoint.resume={straight}/checkpoints/step-000002"
    again = run(tmp_path / "again", *OWN, *SAVES, resume)
    assert [row["step"] for row in metrics(again)] == [3, 4]
    assert tensors(again, 4) == tensors(straight, 4)


def test_changed_arguments_of_a_users_schedule_are_noted_at_a_resume(tmp_path, capsys):
    before = run(tmp_path / "before", *OWN, *shape(), steps=2)
    resume = f"checkpoint.resume={before}/checkpoints/step-000002"
    other = OWN[0].replace("2", "3")
    assert main([*TINY, *shape(), other, OWN[1], resume, "train.steps=4", "show=plan"]) == 0
    assert "schedule.warmup 2 -> 3: since step-000002" in capsys.readouterr().out


def test_one_that_gives_no_share_is_refused_and_nothing_is_started(tmp_path, capsys):
    gives = "schedule={_target_: tests.optim.own_schedules.Gives, value: '-1', at: 3}"
    words = [*TINY, gives, "security.allow=[tests]", f"run_dir={tmp_path}/run", "train.steps=4"]
    for more in ([], ["show=plan"]):
        assert main([*words, *more]) == 2
        assert capsys.readouterr().err == (
            "error: 1 problem in this request; nothing was started\n\n"
            "  schedule._target_ = tests.optim.own_schedules.Gives: at step 3 it returns -1, but a factor of optim.lr "
            "must be a finite number of at least 0\n"
            f"    set by: {gives} (command line)\n"
        )
    assert not (tmp_path / "run").exists()
    assert main([*words, "debug.limit=3", *shape()]) == 0


def test_on_top_of_a_shipped_schedule_it_is_refused_and_the_cure_passes(capsys):
    path = "tests.optim.own_schedules.InverseRoot"
    words = [*TINY, *shape(), f"schedule._target_={path}", "security.allow=[tests]", "train.steps=4", "show=plan"]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  schedule._target_ = {path}: the settings of schedule=cosine would become its arguments\n"
        f"    set by: schedule._target_={path} (command line)\n"
        f"    try:    schedule=null schedule._target_={path}\n"
    )
    assert main(["schedule=null", *words, "~schedule.warmup_steps"]) == 0  # the recipe sets it


def test_a_module_that_is_not_there_is_refused(capsys):
    words = [*TINY, "schedule={_target_: nonesuch.Schedule}", "security.allow=[nonesuch]", "train.steps=4"]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  schedule._target_ = nonesuch.Schedule: there is no module nonesuch on sys.path; start in the folder that "
        "contains it\n"
        "    set by: schedule={_target_: nonesuch.Schedule} (command line)\n"
    )
