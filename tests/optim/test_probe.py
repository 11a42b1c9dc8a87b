"""What a trial on small tensors finds out about an optimizer."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from launcher.job.schema.user_class import Target
from launcher.optim import dry_run as probing
from launcher.optim.build import build_own
from launcher.optim.dry_run import small
from launcher.plan.values.optimizer import OptimizerTraits
from launcher.planner.plan_job import plan_job
from tests.parity import job

SHAPES = [(512, 256), (64, 3), (7,), (256,), (1,), (), (4, 3, 3, 3)]
ADAM = ("exp_avg", "exp_avg_sq", "step")


def tried(path: str, device: str = "cpu", dtype: str = "float64", **arguments: object) -> OptimizerTraits:
    settings = Target.model_validate({"_target_": path, **arguments})
    return probing.probe(partial(build_own, settings, ("torch", "tests")), path, SHAPES, device, dtype)


@pytest.mark.parametrize("more", [{}, {"foreach": True}, {"fused": True}, {"maximize": True}])
def test_adam_updates_each_number_by_itself(more):
    path = "torch.optim.Adam"
    assert tried(path, **more) == OptimizerTraits(path, first=ADAM, keys=ADAM, copies=2)


def test_a_class_that_only_a_gpu_can_run_so_is_tried_without_that():
    path = "torch.optim.Adam"
    assert tried(path, device="cuda", capturable=True) == OptimizerTraits(path, first=ADAM, keys=ADAM, copies=2)
    assert tried(path, capturable=True).broken == (
        "capturable=True is for graphs of an accelerator, and torch refuses it on CPUs; set optim.capturable=false"
    )


def test_an_optimizer_for_fp32_only_is_tried_in_fp32():
    path = "tests.optim.theirs.SinglePrecision"
    assert tried(path, dtype="float32") == OptimizerTraits(path, copies=0)
    assert tried(path).broken == (
        "its step() without a closure fails on dense gradients: AssertionError: fp32 only "
        '(theirs.py:343, in update: assert p.dtype is torch.float32, "fp32 only")'
    )


def test_sums_over_rows_and_state_that_comes_late_are_seen():
    rows = tried("tests.optim.theirs.RowWise")
    assert (rows.rows, rows.elements, rows.alone) == (True, False, True)
    late = tried("tests.optim.theirs.Lookahead")
    assert (late.first, late.keys, late.lost, late.elements) == (("step",), ("slow", "step"), "", True)
    counts = tried("tests.optim.theirs.CounterInGroup")
    assert (counts.counters, counts.lost) == (("k", "late", "seen"), "")


def test_a_trial_detects_sums_over_parameters_that_seldom_change_the_update():
    skips = tried("tests.optim.theirs.Skips")
    assert (skips.alone, skips.counters, skips.lost) == (False, ("usual",), "")
    clipped = tried("tests.optim.theirs.Clipped")
    assert (clipped.rows, clipped.elements, clipped.alone) == (False, False, True)


ELSEWHERE = "after its state and groups are restored, it gives different results, so it keeps state elsewhere"


@pytest.mark.parametrize(
    ("kind", "trait", "value"),
    [("LateNorm", "alone", False), ("LateNoise", "draws", "torch"), ("SeldomSlow", "lost", ELSEWHERE)],
    ids=["LateNorm", "LateNoise", "SeldomSlow"],
)
def test_a_class_that_counts_its_steps_is_tried_after_many_of_them(kind, trait, value):
    assert getattr(tried(f"tests.optim.theirs.{kind}"), trait) == value


def test_hooks_of_parameters_and_another_zero_grad_are_refused():
    assert tried("tests.optim.theirs.ClampsByHook").broken == (
        "it registers hooks on parameters, which would see gradients of micro batches and ranks, not of the batch; use "
        "p.grad in its step()"
    )
    assert tried("tests.optim.theirs.OldZeroGrad").broken == (
        "its zero_grad(set_to_none=True) fails: TypeError: OldZeroGrad.zero_grad() got an unexpected keyword argument "
        "'set_to_none'"
    )


def test_small_tensors_are_as_the_models_are():
    assert small([(512, 256), (64, 3), (7,), (4, 3, 3, 3)]) == [(4, 3, 3, 3), (136, 136), (64, 3), (7,)]
    assert small([(3, 3)]) == [(3, 3), (3, 3)]


def test_a_trial_of_an_optimizer_leaves_random_states_and_threads_unchanged():
    torch.manual_seed(3)
    random.seed(3)
    before = (torch.get_rng_state(), random.getstate(), torch.get_num_threads(), torch.cuda.is_available())
    assert tried("tests.optim.theirs.Noise").draws == "torch"
    assert tried("tests.optim.theirs.PythonNoise").draws == "elsewhere"
    after = (torch.get_rng_state(), random.getstate(), torch.get_num_threads(), torch.cuda.is_available())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_built_in_optimizers_are_not_tried(monkeypatch):
    monkeypatch.setattr(probing, "probe", None)
    assert plan_job(job()).observed.optimizer is None
