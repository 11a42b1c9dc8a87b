from __future__ import annotations

import pytest

from launcher.plan.plan import ask
from launcher.plan.resolve.checkpoint import unsaved
from launcher.plan.resolve.steps import idle
from launcher.planner.plan_job import plan_job
from tests.plan.made import job, refusal, words

TRANSFORM = "steps=[train,save,transform]"
PP4 = ["launch.nproc=4", "parallel.pipeline.stages=4"]
REFUSED = {
    "a sample of no text": (
        ["data=random_tokens", "data.vocab_size=256", "data.seq_len=8", "steps=[train,save,export,sample]"],
        "steps.sample: continues text, but data is random_tokens (try: 'steps=[train,save,export]')",
    ),
    "nothing held out to evaluate": (
        ["data.val_fraction=0", "steps=[train,evaluate]"],
        "data.val_fraction: 0: leaves no held-out samples for evaluate",
    ),
    "nothing held out for three": (
        ["data.val_fraction=0", "train.eval_every=5", "steps=[train,evaluate,save,export]"],
        "data.val_fraction: 0: leaves no held-out samples for evaluate, export, train.eval_every",
    ),
    "more stages than there are": (
        [*PP4, TRANSFORM, "steps.transform.nproc=8", "steps.transform.stages=8"],
        "steps.transform.stages: 8: cannot be made from 4 stages; stages are merged, not cut "
        "(try: steps.transform.stages=4)",
    ),
    "stages that do not merge": (
        [*PP4, TRANSFORM, "steps.transform.nproc=3", "steps.transform.stages=3"],
        "steps.transform.stages: 3: cannot be made from 4 stages; stages are merged, not cut "
        "(try: steps.transform.stages=2)\n"
        "steps.transform.nproc: 3: does not divide into 2 stages x 1 shard (try: steps.transform.nproc=4)",
    ),
    "too few ranks": (
        [*PP4, TRANSFORM, "steps.transform.nproc=3", "steps.transform.stages=2", "steps.transform.shard_size=2"],
        "steps.transform.nproc: 3: does not divide into 2 stages x 2 shards (try: steps.transform.nproc=4)",
    ),
    "too few ranks for a checkpoint of elsewhere": (
        ["steps=[transform]", "steps.transform.src=there", "steps.transform.nproc=3", "steps.transform.stages=2"],
        "steps.transform.nproc: 3: does not divide into 2 stages x 1 shard (try: steps.transform.nproc=4)",
    ),
    "a layout asked for in two ways": (
        [*PP4, TRANSFORM, "steps.transform.strategy=merged.json", "steps.transform.nproc=2"],
        "steps.transform.nproc: 2: the layout is that of the strategy file merged.json (try: steps.transform.nproc=1)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_steps_that_would_fail_after_the_training_are_refused(case: str) -> None:
    overrides, text = REFUSED[case]
    error = refusal(*overrides)
    assert str(error) == text
    if words(error):
        ask(job(*overrides, *words(error)))


@pytest.mark.parametrize("overrides", [
    ["data.val_fraction=0", "steps=[train,save]"],
    ["data.val_fraction=0", "steps=[train,save,export]", "steps.export.check=false"],
    ["data.val_fraction=0", "train.eval_every=5", "steps=[save]"],
    [*PP4, TRANSFORM, "steps.transform.nproc=4", "steps.transform.stages=2", "steps.transform.shard_size=2"],
    ["steps=[transform]", "steps.transform.src=there", "steps.transform.stages=16", "steps.transform.nproc=16"],
], ids=" ".join)  # fmt: skip
def test_compatible_steps_are_accepted(overrides: list[str]) -> None:
    ask(job(*overrides))


def test_settings_that_never_take_effect_are_noted() -> None:
    j = job("train.steps=2", "train.eval_every=2", "checkpoint.every=5", "schedule.warmup_steps=2")
    assert [str(n) for n in idle(j, 2)] == [
        "schedule.warmup_steps 2: the training, 2 steps, is all warm-up",
        "train.eval_every 2: no validation runs during the training, which ends after 2 steps",
        "checkpoint.every 5: no checkpoint is saved during the training, which ends after 2 steps",
    ]


def test_eval_batches_that_nothing_reads_is_noted() -> None:
    unread = "train.eval_batches 3: has no effect, because no validation runs during the training"
    always = ("train.steps=4", "schedule.warmup_steps=0", "train.eval_batches=3")
    j = job(*always, "train.ema.every=5", "steps=[train,save]")
    assert [str(n) for n in idle(j, 4)] == [
        unread,
        "train.ema.every 5: the average stays at the initial weights of the training, which ends after 4 steps",
    ]
    j = job(*always, "train.ema.every=4", "steps=[train,evaluate]")
    assert [str(n) for n in idle(j, 4)] == [f"{unread}; the step evaluate has steps.evaluate.batches"]


@pytest.mark.parametrize("watched", ["checkpoint.best=val_loss", "train.early_stop.metric=val_loss"])
def test_a_metric_that_is_watched_has_a_validation_after_the_last_step(watched: str) -> None:
    j = job("train.steps=2", "schedule.warmup_steps=0", "train.eval_every=5", "train.eval_batches=3", watched)
    assert [*idle(j, 2)] == []


WSD = ("schedule=wsd", "schedule.warmup_steps=6", "train.steps=10")


@pytest.mark.parametrize(("overrides", "text"), [
    (["schedule.decay_steps=5"], "schedule.decay_steps: 5: schedule.warmup_steps=6 leaves 4 of train.steps=10 "
     "(try: schedule.decay_steps=4)"),
    (["schedule.decay_share=0.75"], "schedule.decay_share: 0.75: is 8 steps, and schedule.warmup_steps=6 leaves 4 of "
     "train.steps=10 (try: schedule.decay_steps=4)"),
], ids=["steps", "share"])  # fmt: skip
def test_a_decay_that_would_begin_in_warmup_is_refused_and_the_cure_passes(overrides: list[str], text: str) -> None:
    error = refusal(*WSD, *overrides)
    assert str(error) == text
    ask(job(*WSD, *overrides, *words(error)))


@pytest.mark.parametrize("overrides", [
    ["schedule.decay_steps=4"], ["schedule.decay_share=0.4"], ["schedule.decay_steps=0"],
    ["schedule.decay_steps=5", "steps=[save]"], ["schedule.decay_steps=5", "train.steps=6"],
    ["schedule.decay_steps=2", "debug=limit"],
], ids=" ".join)  # fmt: skip
def test_a_decay_that_fits_is_left_alone_and_so_is_one_that_no_training_comes_to(overrides: list[str]) -> None:
    ask(job(*WSD, *overrides))


def test_of_a_schedule_what_a_share_is_in_steps_and_a_restart_that_never_comes_are_noted() -> None:
    assert [str(n) for n in idle(job(*WSD), 10)] == [
        "schedule.decay_steps null -> 2: schedule.decay_share=0.2 of 10 steps"
    ]
    restarts = ("schedule=cosine_restarts", "schedule.warmup_steps=2", "train.steps=10")
    assert [str(n) for n in idle(job(*restarts, "schedule.period_steps=8"), 10)] == [
        "schedule.period_steps 8: there is no restart, because the training, 10 steps, ends before it"
    ]
    assert [*idle(job(*restarts, "schedule.period_steps=7"), 10)] == []
    assert [*idle(job(*WSD, "schedule.decay_steps=2"), 10)] == []


def test_settings_that_take_effect_are_not_noted() -> None:
    j = job("train.steps=3", "train.eval_every=2", "checkpoint.every=2", "schedule.warmup_steps=2")
    assert [*idle(j, 3)] == []


LOST = (
    "checkpoint.every null: nothing is saved before the end, so a failure may lose {} hours of training (predicted); "
    "checkpoint.every="
)


@pytest.mark.parametrize(("steps", "seconds", "text"), [
    ("train", 3.3, f"{LOST.format('9.2')}500 saves every 28 minutes and 'steps=[train,save]' at the end"),
    ("train,save", 3.3, f"{LOST.format('9.2')}500 saves every 28 minutes"),
    ("train,save,train,save", 1.0, f"{LOST.format('1.4')}1000 saves every 17 minutes"),
    ("train,save,train", 3000.0,
     f"{LOST.format('4166.7')}1 saves every 50 minutes and 'steps=[train,save,train,save]' at the end"),
    ("train,save,train,export", 1.0, f"{LOST.format('1.4')}1000 saves every 17 minutes and "
     f"'steps=[train,save,train,save,export]' at the end"),
], ids=["train", "train,save", "saved halfway", "saved halfway only", "export of what was not saved"])  # fmt: skip
def test_hours_that_a_failure_would_lose_are_noted_with_a_cure_that_passes(
    steps: str, seconds: float, text: str
) -> None:
    overrides = (f"steps=[{steps}]", "train.steps=10000")
    assert [str(n) for n in unsaved(job(*overrides), 10_000, seconds)] == [text]
    cures = [word.strip("'") for word in text.split() if "=" in word]
    assert [*unsaved(job(*overrides, *cures), 10_000, seconds)] == []


@pytest.mark.parametrize("overrides", [
    ["checkpoint.every=5000"], ["checkpoint.best=val_loss", "train.eval_every=100"], ["steps=[save]"],
], ids=" ".join)  # fmt: skip
def test_a_job_that_saves_or_trains_nothing_loses_nothing(overrides: list[str]) -> None:
    assert [*unsaved(job("train.steps=10000", *overrides), 10_000, 10.0)] == []


def test_a_training_of_minutes_may_go_unsaved() -> None:
    assert [*unsaved(job("steps=[train]"), 1000, 3.5)] == []
    assert [*unsaved(job("steps=[train]"), 1000, 3.6)] != []


def test_the_plan_for_a_cluster_names_the_hours_that_would_be_lost() -> None:
    here, there = ([], ["cluster=h100_sxm"])
    found = [plan_job(job("train.steps=1000000000", "steps=[train]", *more)).notes for more in (here, there)]
    said = [[str(n) for n in notes if n.key == "checkpoint.every"] for notes in found]
    assert said[0] == []
    assert len(said[1]) == 1
    assert said[1][0].startswith("checkpoint.every null: nothing is saved before the end, so a failure may lose ")


def test_settings_of_a_training_are_not_noted_without_one() -> None:
    assert [*idle(job("steps=[save]", "train.eval_every=500"), 200)] == []
