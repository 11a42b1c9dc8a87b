"""bf16 and fp16 compute in half precision and keep fp32 weights, with the same result in every layout."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

from launcher.errors import RequestError, RunError
from launcher.job.schema.job import Job
from launcher.objective.losses import cross_entropy
from launcher.parallel.local_tensors import local
from launcher.parallel.trace.model_structure import skeleton
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.cut.tensor_placement import full_precision_names
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import checkpoint_tensors, loop, save
from launcher.runtime.training.loss_scaling import Scaling
from launcher.steps import train
from launcher.steps.model.build_session import build as build_session
from tests.parallel.counting import assert_as_planned
from tests.parallel.named_dtype_nets import Named
from tests.parity import Outcome, assert_same, batch, job, own, plain, rank_train, under_layout, whole
from tests.parity.reference import accumulate
from tests.ranks import DRAWN, on_ranks
from tests.tiers import some

EPS = {"bf16": 2**-8, "fp16": 2**-11}
LEVELS = ("level1", "level2", "level3")


def hsdp(level: str, **more: Any) -> dict[str, Any]:
    return {"shard_size": 2, "threshold": 0, "optimizer_level": level, **more}


LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "2 replicas": {"grid": {"dp_replicate": 2}},
    **{level: {"hsdp": hsdp(level)} for level in LEVELS},
    "threshold": {"hsdp": hsdp("level2", threshold=1), "pipeline": {"micro_batch_num": 2}},
    "2 stages": {"pipeline": {"stages": 2}},
    "interleaved, level3": {
        "pipeline": {"stages": 2, "interleave": True, "micro_batch_num": 4},
        "hsdp": hsdp("level3"),
    },
    "2 stages, 2x2": {"pipeline": {"stages": 2}, "hsdp": hsdp("level1"), "grid": {"dp_replicate": 2}},
}  # fmt: skip


def low_alone(j: Any, plan: Any, parts: int) -> Outcome:
    """Return the outcome of the plain model.

    Its fp32 weights are cast for each forward, and its gradients are summed in fp32.
    """
    model, low = plain(j, plan), dtype_of(plan.dtypes.compute)
    kept = full_precision_names(skeleton(model))
    own = dict(model.named_parameters())
    total, (xs, y) = 0.0, batch(j, plan)
    for *x, t in zip(*(v.chunk(parts) for v in (*xs, y)), strict=True):
        cast = {n: p if n in kept else p.to(low) for n, p in own.items()}
        loss = cross_entropy(functional_call(model, cast, tuple(x)), t) / parts
        loss.backward()
        total += loss.item()
    grads = {n: p.grad for n, p in own.items() if p.grad is not None}
    square = sum(g.double().square().sum().item() for g in grads.values())
    buffers = dict(model.named_buffers())
    return Outcome(total, math.sqrt(square), grads, {p.name: buffers[p.name] for p in plan.params if p.buffer})


@pytest.mark.parametrize(("layout", "precision"), some(product(LAYOUTS, ("bf16", "fp16"))))
def test_every_layout_equals_one_process_to_a_rounding(layout, precision):
    """The tolerance is one rounding of the largest gradient, because two tied stages add their terms in fp32."""
    j = job(parallel=LAYOUTS[layout], train__precision=precision, train__loss_scale=1.0)
    plan, got = under_layout(j)
    assert {g.dtype for g in got.grads.values()} == {torch.float32}
    want = low_alone(j, plan, plan.sizes.micros * plan.sizes.replicas)
    assert_same(got, want, EPS[precision] if plan.ties else 1e-6)


def test_batch_norm_keeps_its_weights_as_wide_as_its_statistics():
    j = own("nets.Normed", [2, 6, 6], stages=1, train__precision="bf16", parallel={"hsdp": hsdp("level2")})
    plan, got = under_layout(j)
    computed = {p.name: p.compute for p in plan.params}
    assert (computed["first.weight"], computed["norm1.weight"]) == ("bfloat16", "float32")
    assert not any(p.sharded for p in plan.params if "norm" in p.name)
    assert_same(replace(got, buffers={}), replace(low_alone(j, plan, 2), buffers={}), 1e-6)


def test_messages_and_gathered_weights_have_half_the_bytes_in_bf16():
    layout = {"parallel": LAYOUTS["2 stages, 2x2"]}
    low, full = (assert_as_planned(job(**layout, train__precision=p)) for p in ("bf16", "fp32"))
    for kind in ("all_gather", "send", "receive"):
        assert [(r[kind][0], 2 * r[kind][1]) for r in low] == [r[kind] for r in full]
    assert [r["reduce_scatter"] for r in low] == [r["reduce_scatter"] for r in full]


@pytest.mark.parametrize("layout", some(["2 replicas", "level1", "level3"]))
def test_gradients_travel_in_half_precision_when_asked(layout):
    parallel = LAYOUTS[layout]
    j, wide_one = (job(parallel=parallel | {"gradient_fp32_sync": on}, train__precision="bf16") for on in (False, True))
    plan, got = under_layout(j)
    assert {g.dtype for g in got.grads.values()} == {torch.float32}
    assert_same(got, low_alone(j, plan, 2), 2 * EPS["bf16"])
    kind, loss = ("all_reduce", 32) if layout == "2 replicas" else ("reduce_scatter", 0)
    assert 2 * (assert_as_planned(j)[0][kind][1] - loss) == assert_as_planned(wide_one)[0][kind][1] - loss


def rank_scaled(world: World, j: Job, plan: Plan, folder: Path) -> tuple[Any, ...]:
    """Run a step that overflows, a good step, and the good step again from a checkpoint between them."""
    said: list[Any] = []
    s = build_session(replace(world, send=said.append), j, plan, folder, drawn=DRAWN)
    before = {n: local(t.detach()).clone() for n, t in s.model.trainable()}
    s.scaling.factor = 2.0**127
    first = loop.step(s, 1.0)
    kept = all(torch.equal(before[n], local(t.detach())) for n, t in s.model.trainable())
    halved, s.step = s.scaling.factor, 1
    s.scaling.factor = 1024.0
    saved = save.save(s, None)
    second = loop.step(s, 1.0)
    checkpoint_tensors.load(s, saved)
    scale = (s.scaling.factor, s.scaling.good)
    again = loop.step(s, 1.0)
    return math.isfinite(first[1]), kept, halved, scale, second == again, [n for n in said if "text" in n]


def test_an_overflow_is_skipped_by_all_ranks_and_the_scale_goes_on_after_a_resume(tmp_path):
    j = job(parallel=LAYOUTS["level1"], train__precision="fp16", train__steps=3)
    found = on_ranks(2, rank_scaled, j, plan_job(j), tmp_path)
    text = f"step 1: skipped: gradients overflowed at loss scale {2.0**127:g}; the scale is now {2.0**126:g}"
    assert found == [(False, True, 2.0**126, (1024.0, 0), True, said) for said in ([{"text": text}], [])]


def test_a_scale_is_doubled_after_2000_good_steps_and_halved_after_a_bad_one():
    s = Scaling(4.0, dynamic=True)
    for _ in range(2000):
        s.went_well()
    assert (s.factor, s.good, s.lowest) == (8.0, 0, False)
    for _ in range(3):
        s.overflowed()
    assert (s.factor, s.lowest, s.skipped) == (1.0, True, 3)


def rank_rates(world: World, j: Job, plan: Plan, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of five steps, of which two overflow, and those after a resume at step three."""
    rows: list[list[dict[str, Any]]] = [[], []]
    for resumed, told in enumerate(rows):
        s = build_session(replace(world, send=told.append), j, plan, folder, drawn=DRAWN)
        s.scaling.factor = 2.0**127
        if resumed:
            checkpoint_tensors.load(s, folder / "checkpoints/step-000003")
        training = train.loop_settings(s, j)
        while s.step < training.until:
            if s.step == 2:
                s.scaling.factor = 1024.0
            loop.train(s, replace(training, until=s.step + 1))
            if s.step == 3 and not resumed:
                save.save(s, None)
    return tuple([row for row in told if "loss" in row] for told in rows)


def test_skipped_steps_are_counted_in_metrics_and_do_not_use_up_the_schedule(tmp_path):
    j = job(train__precision="fp16", train__steps=5, schedule={"name": "linear", "warmup_steps": 0, "final": 0.0})
    [(straight, resumed)] = on_ranks(1, rank_rates, j, plan_job(j), tmp_path)
    assert [(row["step"], row["skipped"]) for row in straight] == [(3, 2), (4, 2), (5, 2)]

    # as with a torch scheduler that is stepped only after updates
    rates = [j.optim.lr * share for share in (1.0, 0.75, 0.5)]
    assert [row["lr"] for row in straight] == pytest.approx(rates, rel=1e-12)
    assert [(row["step"], row["skipped"], row["lr"]) for row in resumed] == [
        (row["step"], row["skipped"], row["lr"]) for row in straight[1:]
    ]


def rank_fixed(world: World, j: Job, plan: Plan, folder: Path) -> str:
    s = build_session(world, j, plan, folder, drawn=DRAWN)
    with pytest.raises(RunError) as raised:
        loop.step(s, 1.0)
    return str(raised.value)


def test_an_overflow_at_a_fixed_scale_ends_the_run(tmp_path):
    j = job(train__precision="fp16", train__loss_scale=2.0**127)
    (said,) = on_ranks(1, rank_fixed, j, plan_job(j), tmp_path)
    assert said.endswith(". The gradients overflowed; train.loss_scale=null lowers the scale when they do")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_clipped_steps_keep_the_weights_in_fp32_and_the_copies_equal(precision):
    j = job(parallel=LAYOUTS["2 stages, 2x2"], train__precision=precision)
    plan = plan_job(j)
    ranks = on_ranks(plan.sizes.grid.size, rank_train, j, plan, 3, 0.5)
    got = whole(plan, [p for held in ranks for p in held])
    assert {t.dtype for t in got.values()} == {torch.float32}


@pytest.mark.parametrize("layout", ["one process", "level3", "2 stages"])
def test_a_model_whose_constructor_names_dtypes_trains_in_fp64_as_its_double(layout: str) -> None:
    j = own("named_dtype_nets.Named", [6], stages=1, parallel=LAYOUTS[layout])
    plan, got = under_layout(j)
    assert {p.spec.dtype for p in plan.params} == {"float64", "int8", "bool"}
    model = Named().double()
    model.load_state_dict(plain(j, plan).state_dict())
    loss = accumulate(model, *batch(j, plan), 1)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt().item()
    buffers = {p.name: model.get_buffer(p.name) for p in plan.params if p.buffer}
    assert_same(got, Outcome(loss, norm, grads, buffers), 1e-12)


def test_a_weight_of_another_dtype_than_the_others_is_named() -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(own("named_dtype_nets.Doubled", [6], stages=1, train__precision="fp32"))
    assert re.sub(r":\d+\)", ")", str(refused.value)) == (
        "model: the forward calls mm of float32 and float64 (named_dtype_nets.py), which torch rejects; the "
        "constructor names the dtype of weight (float64); create such weights in torch's default dtype, float32 here"
    )
