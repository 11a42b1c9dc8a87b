"""A deep model that is traced by way of two shallow ones gets the same plan as if it were traced in full."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.show.plan_json import as_json
from launcher.planner import extrapolated_layers
from launcher.planner.extrapolated_layers import DEEP, Unlike, shallow
from launcher.planner.plan_job import plan_job
from launcher.planner.trace_model import Traces

DEPTH = DEEP + 3
FOUR = ("parallel.pipeline.stages=2", "launch.nproc=4", "parallel.pipeline.micro_batch_num=4")


def job(*overrides: str) -> Job:
    small = (f"model.layers={DEPTH}", "model.dim=64", "model.heads=4", "train.batch_size=16")
    return compose(["recipe=lm_single", *small, *overrides]).job


def both(asked: Job) -> tuple[Any, Any]:
    """Return the plan with all layers traced, and the plan by way of two shallow models."""
    return plan_job(asked, Traces()), plan_job(asked, Traces(shallow=True))


def every(policy: str) -> str:
    modules = ", ".join(f"layers.{n}: {policy}" for n in range(DEPTH))
    return f"parallel.recompute={{modules: {{{modules}}}}}"


def named() -> str:
    """Operators of every layer, each by its full name."""
    operators = ", ".join(f"layers.{n}.mlp.{one}: {{weight: {way}}}" for n in range(DEPTH) for one, way in (
        ("up", "[tp, null]"), ("gate", "[tp, null]"), ("down", "[null, tp]")))  # fmt: skip
    return f"parallel.operators={{{operators}}}"


LIST = (f"parallel.recompute={{modules: [{', '.join(f'layers.{n}' for n in range(DEPTH))}]}}",)
SELECTIVE, FULL, GLOB = (every("selective"),), (every("full"),), ("parallel.recompute={modules: layers.*}",)


@pytest.mark.parametrize(
    ("layout", "again"),
    [
        ((), ()),
        ((), FULL),
        (("cluster=h100_sxm", "train.precision=bf16"), SELECTIVE),
        (("model.tied=false", *FOUR), ()),
        (("model.tied=false", *FOUR), GLOB),
        ((*FOUR, "operators=megatron", "parallel.grid.tp=2"), SELECTIVE),
        ((*FOUR, "operators=sequence", "parallel.grid.tp=2", "cluster=h100_sxm"), ()),
        ((*FOUR, "operators=sequence", "parallel.grid.tp=2"), FULL),
        (("operators=sequence", "parallel.grid.tp=2", "launch.nproc=2"), GLOB),
        ((*FOUR, "parallel.pipeline.scheduler=zero_bubble_v"), SELECTIVE),
        ((*FOUR, named(), "parallel.grid.tp=2"), LIST),
        ((*FOUR, "parallel.pipeline.interleave=true", "+parallel.hsdp={optimizer_level: level3}"), FULL),
    ],
)
def test_a_plan_by_extrapolated_layers_equals_the_full_plan(layout: tuple[str, ...], again: tuple[str, ...]) -> None:
    asked = job(*layout, *again)
    assert shallow(asked, None) is not None
    whole, by_two = both(asked)
    assert by_two == whole
    assert as_json(by_two) == as_json(whole)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.layers=7",),
        ("parallel.recompute={modules: [layers.0, layers.3]}",),
        ("parallel.recompute={modules: 'layers.[0-5]'}",),
        ("parallel.recompute={modules: 'layers.?'}",),
        ("parallel.recompute={modules: layers.*, every: 2}",),
        ("parallel.grid.tp=2", "launch.nproc=2", "parallel.operators={layers.4.mlp.up: {weight: [tp, null]}}"),
        ("train.compile={}",),
        (*FOUR, "parallel.pipeline.scheduler=seqpipe", "parallel.pipeline.seq_chunks=2"),
    ],
)  # fmt: skip
def test_layers_that_are_few_or_not_treated_alike_are_followed_one_by_one(overrides: tuple[str, ...]) -> None:
    assert shallow(job(*overrides), None) is None


def test_another_model_is_followed_as_it_is() -> None:
    assert shallow(compose(["recipe=resnet50_cifar_pp2"]).job, None) is None


def test_stages_that_take_a_layer_apart_are_followed_one_by_one() -> None:
    names = [f"layers.{n}" for n in range(1, DEPTH)]
    assert shallow(job(), ("layers.0.attn", "layers.0.mlp", *names)) is None
    assert shallow(job(), ("embed", "layers.0", *names)) is not None


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("layers.1", "layers.1.attn"),
        (True, False),
        (1.0, 2.0),
        (("a", "b"), ("a",)),
        (("layers.0",), ("layers.0", "x", "y")),
        (frozenset({1}), frozenset({1, 2})),
    ],
)
def test_values_that_cannot_be_extrapolated_raise_unlike(one: Any, two: Any) -> None:
    with pytest.raises(Unlike):
        extrapolated_layers._along(one, two, 3)
