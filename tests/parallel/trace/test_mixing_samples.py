"""The plan says of a model that its samples depend on one another; BatchNorm is known."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parity import own

TEXT = (
    "what its forward gives for a sample depends on the other samples of its batch: another batch size, or a batch "
    "in parts, trains to other numbers"
)
CUTS: dict[str, dict[str, Any]] = {
    "1 micro batch and 2 data-parallel ranks": {"grid": {"dp_replicate": 2}},
    "2 micro batches and 1 data-parallel rank": {"pipeline": {"micro_batch_num": 2}},
}
MIXING = ["negatives", "mean", "mean and dropout", "capacity"]


def net(kind: str, parallel: dict[str, Any], name: str = "Net") -> Job:
    model = {"_target_": f"tests.parallel.mixing_nets.{name}", "kind": kind}
    return own(f"mixing_nets.{name}", [6], stages=1, model=model, parallel=parallel)


@pytest.mark.parametrize("cut", [{}, *CUTS.values()], ids=["in one piece", *CUTS])
@pytest.mark.parametrize("kind", MIXING)
def test_the_plan_says_that_samples_depend_on_one_another(kind, cut):
    assert [n.text for n in plan_job(net(kind, cut)).notes if n.key == "model"] == [TEXT]


def test_it_is_training_that_counts():
    plan = plan_job(net("mean", {"grid": {"dp_replicate": 2}}, "OnlyTrained"))
    assert [n.text for n in plan.notes if n.key == "model"] == [TEXT]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["batch norm", "functional norm", "layer norm", "dropout", "experts"])
def test_other_models_are_planned(kind, cut):
    plan = plan_job(net(kind, CUTS[cut]))
    assert [n for n in plan.notes if n.key == "model"] == []
