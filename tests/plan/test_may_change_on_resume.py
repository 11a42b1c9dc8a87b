"""Every setting is in one class of what may change between a checkpoint and the run that resumes from it."""

from __future__ import annotations

import pytest

from launcher.job.schema import keys as schema_keys
from launcher.job.schema import redact
from launcher.job.schema.user_class import Target
from launcher.plan.may_change_on_resume import (
    CHOSEN,
    DERIVED,
    LAYOUT,
    NOTED,
    REFUSED,
    UNRELATED,
    UNSET,
    Difference,
    class_of,
    differences,
    recorded,
)
from launcher.planner.plan_job import plan_job
from tests.plan.made import job

SECTIONS = ("train", "parallel", "parallel.pipeline", "debug")
"""Sections whose keys are in several classes."""
KEYS = sorted({*schema_keys.everywhere()} - {*SECTIONS})


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_is_in_one_class(key):
    assert len(class_of(key)) == 1, "say in plan/may_change_on_resume.py what a resume does about it"


@pytest.mark.parametrize("key", [*SECTIONS, "train.brand_new", "parallel.pipeline.brand_new", "brand_new"])
def test_a_new_setting_cannot_be_forgotten(key):
    assert class_of(key) == ()


def test_every_name_of_a_class_is_that_of_a_setting():
    known = {*schema_keys.everywhere(), "optim._target_"}
    assert not {*REFUSED, *DERIVED, *NOTED, *LAYOUT, *UNRELATED} - known


TINY = (
    "model=lm_tiny",
    "model.dim=16",
    "data=random_tokens",
    "data.vocab_size=64",
    "data.seq_len=8",
    "optim=sgd",
    "steps=[train]",
)


@pytest.fixture(scope="module")
def mine():
    asked = job(*TINY)
    return asked, plan_job(asked)


def test_chosen_options_are_compared_argument_by_argument(mine):
    found = recorded(*mine)
    assert {key.partition(".")[0] for key in found if "." in key} >= {*CHOSEN, "train", "parallel", "debug"}
    assert not {key for key in found if key != "derived" and class_of(key) in (("layout",), ("unrelated",))}
    assert differences(found, *mine) == []


def test_a_checkpoint_from_before_there_were_losses_was_trained_with_cross_entropy(mine):
    old = {key: value for key, value in recorded(*mine).items() if not key.startswith("loss")}
    assert differences(old, *mine) == []


CHANGES = {
    "other data": ({"data.name": "text"}, ["data"], Difference("data", "text", "random_tokens", REFUSED["data"])),
    "another model": ({"model._target_": "a.B"}, ["model"], Difference("model", "a.B", "lm", REFUSED["model"])),
    "another optimizer": (
        {"optim.name": "adamw"}, ["optim.name"], Difference("optim.name", "adamw", "sgd", REFUSED["optim.name"])
    ),
    "the same by another name": ({"optim.name": "momentum"}, [], None),
    "another rate": ({"optim.lr": 5.0}, ["optim.lr"], Difference("optim.lr", 5.0, 0.003)),
    "another schedule": ({"schedule.name": "linear"}, ["schedule.name"], None),
    "true for 1": ({"data.samples": True}, ["data.samples"], None),
    "an argument that is gone": (
        {"data.shuffle": 1}, ["data.shuffle"], Difference("data.shuffle", 1, UNSET, REFUSED["data"])
    ),
    "gradients of another size": (
        {"derived": {"gradient_scale": 2, "micro_batches": None}, "parallel.gradients_mean": False},
        ["parallel.gradients_mean"],
        Difference(
            "parallel.gradients_mean", "2 times the mean gradient", "1 times the mean gradient",
            "steps would have another size",
        ),
    ),
    "sums of one": ({"parallel.gradients_mean": False}, [], None),
}  # fmt: skip


@pytest.mark.parametrize(("change", "keys", "difference"), CHANGES.values(), ids=CHANGES)
def test_a_difference_is_told_by_key_old_and_new(change, keys, difference, mine):
    found = differences(recorded(*mine) | change, *mine)
    assert [d.key for d in found] == keys
    assert difference in (None, *found)


def test_a_setting_that_there_was_not_then_had_its_default(mine):
    found = recorded(*mine)
    del found["parallel.gradient_fp32_sync"], found["data.samples"]
    assert differences(found, *mine) == []
    del found["data.seq_len"]  # it has no such setting
    assert [(d.key, d.old) for d in differences(found, *mine)] == [("data.seq_len", UNSET)]


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ("5 tokens", "7 tokens", ["data"]),
        ("5 tokens", "5 tokens", []),
        (None, "7 tokens", []),
        ("5 tokens", None, []),
    ],
    ids=["changed", "the same", "an old checkpoint", "not files"],
)
def test_files_that_changed_in_their_place_are_other_data(old, new, keys, mine):
    found = differences(recorded(*mine, old), *mine, new)
    assert [d.key for d in found] == keys
    assert all((d.old, d.new, d.why) == (old, new, REFUSED["data"]) for d in found)


def test_a_secret_is_hidden(mine):
    asked, plan = mine
    secret = Target.model_validate({"_target_": "a.B", "api_key": "hush"})
    found = recorded(asked.model_copy(update={"data": secret}), plan)
    assert found["data._target_"] == "a.B"
    assert found["data.api_key"] == redact.digest("hush")
    assert "hush" not in found["data.api_key"]


@pytest.mark.parametrize(("old", "new"), [(1, 200), ("<mask>", "<pad>"), ("hush", "hunter2")])
@pytest.mark.parametrize("key", ["mask_token", "api_key"])
def test_another_token_or_key_is_other_data(key, old, new, mine):
    asked, plan = mine
    first, second = (
        asked.model_copy(update={"data": Target.model_validate({"_target_": "a.B", key: value})})
        for value in (old, new)
    )
    saved = recorded(first, plan)
    assert [(d.key, d.why) for d in differences(saved, second, plan)] == [(f"data.{key}", REFUSED["data"])]
    assert not differences(saved, first, plan)
    assert not differences({**saved, f"data.{key}": "***"}, second, plan)
