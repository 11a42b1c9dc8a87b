"""The plan says which samples are trained at which rates, and the rates are those of the schedule."""

from __future__ import annotations

import json

import pytest

from launcher.job.compose import compose
from launcher.optim.schedule import factors
from launcher.plan.show.plan_json import as_json
from launcher.plan.show.text import text
from launcher.planner.plan_job import plan_job

LABELS = ("data", "optimizer", "lr", "clipping")
SMALL = (
    "recipe=lm_single",
    "model=lm_tiny",
    "data=random_tokens",
    "data.vocab_size=64",
    "data.seq_len=8",
    "steps=[train]",
)


def lines(*words: str) -> dict[str, str]:
    """Return what the plan says about its training, by label."""
    training = plan_job(compose([*SMALL, *words]).job).training
    assert training is not None
    return dict(training.lines())


def test_the_plan_has_a_line_each() -> None:
    assert lines("train.steps=10", "train.batch_size=4") == {
        "data": "random_tokens: 40 samples, 320 tokens in 10 steps",
        "optimizer": "adamw: lr 0.003, betas [0.9, 0.95], weight_decay 0.1",
        "lr": "cosine: warm-up takes 20 steps, and the training has only 10",
        "clipping": "a gradient with a norm above 1 is scaled down to it (train.clip_norm)",
    }


def test_samples_that_are_no_tokens_and_epochs() -> None:
    words = ("recipe=mlp_autoparallel", "train.steps=null", "train.epochs=2", "debug.overfit=96")
    plan = plan_job(compose(words).job)
    assert "\n  data      mnist5k: 192 samples in 2 epochs, 6 steps\n" in text(plan)
    stored = json.loads(as_json(plan))["training"]
    assert (stored["samples"], stored["tokens"], stored["steps"], stored["epochs"]) == (192, None, 6, 2)


OPTIMIZERS = {
    "optim=sgd optim.lr=0.1": "sgd: lr 0.1",
    "optim=sgd optim.momentum=0.9 optim.nesterov=true optim.lr=0.1": "sgd: lr 0.1, momentum 0.9, nesterov true",
    "optim=muon optim.lr=0.02 optim.adamw.lr=0.001":
        "muon: lr 0.02, momentum 0.95, nesterov true, weight_decay 0.1; adamw for parameters that are not matrices: "
        "lr 0.001, betas [0.9, 0.95], weight_decay 0.1",
    "optim.lr=0.001 optim.groups.*norm*.weight_decay=0":
        "adamw: lr 0.001, betas [0.9, 0.95], weight_decay 0.1; 1 group of parameters with their own settings",
}  # fmt: skip


@pytest.mark.parametrize("words", OPTIMIZERS)
def test_the_optimizer_with_its_settings(words: str) -> None:
    assert lines(*words.split())["optimizer"] == OPTIMIZERS[words]


SCHEDULES = {
    "schedule=constant schedule.warmup_steps=0": ("constant: lr in every step", 1.0),
    "schedule=cosine schedule.warmup_steps=4":
        ("cosine: 4 steps of warm-up, then from lr down to 0.1 of it at step 20", 0.1),
    "schedule=linear schedule.warmup_steps=1 schedule.final=0.2":
        ("linear: 1 step of warm-up, then from lr down to 0.2 of it at step 20", 0.2),
    "schedule=polynomial schedule.warmup_steps=0 schedule.power=3":
        ("polynomial: from lr down to 0 of it at step 20, by a power of 3", 0.0),
    "schedule=wsd schedule.warmup_steps=2 schedule.decay_steps=5 schedule.final=0.5":
        ("wsd: 2 steps of warm-up, then lr, and down to 0.5 of it in the last 5 steps", 0.5),
}  # fmt: skip


@pytest.mark.parametrize("words", SCHEDULES)
def test_the_rate_is_at_the_end_what_the_line_says(words: str) -> None:
    line, final = SCHEDULES[words]
    typed = ("train.steps=20", *words.split())
    assert lines(*typed)["lr"] == line
    rate = factors(compose([*SMALL, *typed]).job.schedule, 20, ())
    assert (rate(19), max(map(rate, range(20)))) == (pytest.approx(final), 1.0)


def test_restarts_are_said_with_their_periods() -> None:
    words = ("train.steps=20", "schedule=cosine_restarts", "schedule.warmup_steps=0", "schedule.period_steps=5")
    assert lines(*words)["lr"] == "cosine_restarts: from lr down to 0 of it in periods of 5 steps"
    assert lines(*words, "schedule.period_multiplier=2")["lr"] == (
        "cosine_restarts: from lr down to 0 of it in periods of 5 steps, each 2 times as long as the one before"
    )


def test_no_clipping_is_said_too() -> None:
    assert lines("train.clip_norm=null")["clipping"] == "none (train.clip_norm=null)"


def test_a_run_that_trains_nothing_has_none_of_these_lines() -> None:
    plan = plan_job(compose([*SMALL, "steps=[evaluate]"]).job)
    assert plan.training is None
    assert not {row[2:11].strip() for row in text(plan).splitlines()} & {*LABELS}
