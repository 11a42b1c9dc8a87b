"""Training steps and evaluations in turn do not affect each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from launcher.objective.losses import cross_entropy
from launcher.optim.build import build_optimizer
from launcher.planner.plan_job import plan_job
from launcher.runtime.faults import RanksFailed
from launcher.runtime.training.batches import Feed
from tests.optim.grouped import grouped
from tests.parallel.sources import Shapes
from tests.parity import batch, build, error, job, own, pieces, place, plain, step, whole
from tests.ranks import on_ranks

HSDP = {"shard_size": 2, "threshold": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "2 stages": {"pipeline": {"stages": 2}},
    "interleaved": {"pipeline": {"stages": 2, "interleave": True}},
    **{f"2 stages x shard 2, {level}": {"pipeline": {"stages": 2}, "hsdp": HSDP | {"optimizer_level": level}}
       for level in ("level1", "level2", "level3")},
    "replicate 2": {"grid": {"dp_replicate": 2}},
}  # fmt: skip
each_layout = pytest.mark.parametrize("parallel", list(LAYOUTS.values()), ids=list(LAYOUTS))
VAL = 13


def feed(j, par, pipe, samples: int = VAL) -> Feed:
    shapes = j.data.arguments["shapes"]
    return Feed(
        Shapes(shapes, "train"), Shapes(shapes, "val", samples), lambda step, size, n: np.arange(size), par.plan,
        par.meshes.rank, torch.device("cpu"), torch.float64, torch.float64,
    )  # fmt: skip


def evaluate(j, par, pipe) -> float:
    """The mean loss of all held-out samples."""
    both = torch.zeros(2, dtype=torch.float64)
    for b in feed(j, par, pipe).held_out(None):
        both += pipe.evaluate(b.inputs, b.targets, b.valid)
    torch.distributed.all_reduce(both)
    return float(both[0] / both[1])


def images(parallel: dict[str, Any]) -> Any:
    """A small network with BatchNorm, which behaves differently in evaluation than in training."""
    return own("nets.Normed", [2, 6, 6], stages=2, train__batch_size=8, parallel=parallel)


def rank_mean(world, j, plan) -> float:
    par, pipe = build(world, j, plan)
    return evaluate(j, par, pipe)


@each_layout
def test_the_mean_over_held_out_samples_that_fill_no_batch_equals_one_process(parallel):
    j = images(parallel)
    plan = plan_job(j)
    assert VAL % plan.sizes.global_batch
    found = on_ranks(plan.sizes.grid.size, rank_mean, j, plan)
    model = plain(j, plan).eval()
    val = Shapes(j.data.arguments["shapes"], "val", VAL)
    everything = np.arange(VAL)
    want = cross_entropy(model(val.inputs(everything)[0].double()), val.targets(everything)).item()
    assert max(abs(loss - want) for loss in found) <= 1e-12


def rank_two_steps(world, j, plan, between: bool) -> tuple[list[Any], list[bool]]:
    par, pipe = build(world, j, plan)
    optimizer = build_optimizer(j.optim, par.param_groups())
    for again in (True, False):
        optimizer.zero_grad(set_to_none=True)
        step(j, par, pipe)
        before = pieces(par)
        if between and again:
            evaluate(j, par, pipe)
        after = pieces(par)
        assert len(before) == len(after)
        assert all(torch.equal(b.value, a.value) for b, a in zip(before, after, strict=True)), "gradients have changed"
        optimizer.step()
        if between and again:
            evaluate(j, par, pipe)
    return pieces(par, weights=True), [m.training for p in par.parts for m in p.module.modules()]


@each_layout
def test_evaluating_between_two_steps_changes_nothing_bit_for_bit(parallel):
    j = images(parallel)
    plan = plan_job(j)
    plainly, between = (on_ranks(plan.sizes.grid.size, rank_two_steps, j, plan, b) for b in (False, True))
    one, two = (whole(plan, [p for held, _ in ranks for p in held]) for ranks in (plainly, between))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert [modes for _, modes in plainly] == [modes for _, modes in between]


def test_two_steps_in_a_row_equal_one_process():
    j = images({"pipeline": {"stages": 2}})
    plan = plan_job(j)
    got = whole(plan, [p for held, _ in on_ranks(2, rank_two_steps, j, plan, True) for p in held])
    model = plain(j, plan)
    optimizer = build_optimizer(j.optim, grouped(j.optim, model.named_parameters()))
    (x,), y = batch(j, plan)
    for _ in range(2):
        optimizer.zero_grad()
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (cross_entropy(model(a), b) / 2).backward()
        optimizer.step()
    want = dict(model.named_parameters()) | dict(model.named_buffers())
    assert got.keys() == want.keys()
    assert max(error(t, want[n].detach()) for n, t in got.items()) <= 1e-9


def rank_other_shape(world, j, plan) -> None:
    par, pipe = build(world, j, plan)
    if par.parts[0].stage.index == 0:
        par.parts[0].module.a.by = lambda x: x[:, :3]
    step(j, par, pipe)


def test_an_output_that_changes_its_shape_is_noticed_before_the_next_stage_reads_nonsense():
    j = own("odd_nets.Changing", [6], stages={"a": 0, "head": 1})
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, rank_other_shape, j, plan_job(j))
    assert failed.value.fault.headline == (
        "rank 0: stage 0 passes on float64 (6, 3), but the plan expects float64 (6, 6); shapes and dtypes between "
        "stages must not depend on the data"
    )


def rank_wrong_size(world, j, plan) -> str:
    _, pipe = build(world, j, plan)
    xs, y = batch(j, plan)
    with pytest.raises(AssertionError) as refused:
        pipe.step(tuple(x[:4] for x in xs), y[:4])
    return str(refused.value)


def test_a_batch_of_another_size_is_noticed():
    j = job()
    assert on_ranks(1, rank_wrong_size, j, plan_job(j)) == ["{4} samples, planned 8: torch would not notice"]


def rank_predict(world, j, plan) -> Any:
    par, pipe = build(world, j, plan)
    step(j, par, pipe)
    xs, y = batch(j, plan)
    n, at = plan.sizes.local_batch, place(plan, par.meshes)
    mine = slice(at * n, (at + 1) * n)
    out = pipe.predict(tuple(x[mine] for x in xs))
    pipe.evaluate(tuple(x[mine] for x in xs), y[mine], n)
    return at, out, torch.cat(pipe.outputs) if pipe.outputs else None


BROADCAST: dict[str, dict[str, Any]] = {
    "2 stages": {"pipeline": {"stages": 2}},
    "there and back": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v"}},
    "interleaved x shard 2": {"pipeline": {"stages": 2, "interleave": True}, "hsdp": HSDP},
}


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("parallel", list(BROADCAST.values()), ids=list(BROADCAST))
def test_output_broadcast_brings_the_last_stages_result_to_every_stage(parallel, everywhere):
    pipeline = parallel["pipeline"] | {"output_broadcast": everywhere}
    j = images(parallel | {"pipeline": pipeline})
    plan = plan_job(j)
    ranks = on_ranks(plan.sizes.grid.size, rank_predict, j, plan)
    model = plain(j, plan)
    (x,), _ = batch(j, plan)
    parts = plan.sizes.micros * plan.sizes.replicas
    with torch.no_grad():
        for a in x.chunk(parts)[: plan.sizes.micros]:  # BatchNorm counts; the first data-parallel rank's count is kept
            model(a)
        want = model.eval()(x).chunk(plan.sizes.replicas)
    last = plan.sizes.places[-1]
    for rank, (at, out, evaluated) in enumerate(ranks):
        if everywhere or plan.sizes.grid.coords(rank)["pp"] == last:
            assert error(out, want[at]) <= 1e-12
        else:
            assert out is None
        assert evaluated is None if not everywhere else torch.equal(evaluated, out)
