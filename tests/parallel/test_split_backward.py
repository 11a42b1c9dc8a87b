"""Backwards split into two halves, for modules that torch's own way of splitting gets wrong."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.job.schema.job import Job
from launcher.parallel.local_tensors import local
from launcher.plan.plan import Plan
from launcher.plan.show import text as plan_text
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.testing.meters import CollectiveMeter
from tests.parity import assert_parity, build, job, own, step, together
from tests.ranks import on_ranks
from tests.tiers import exhaustive, some, some_of

FROZEN = {"embed": 0, "a": 0, "b": 1, "head": 1}
THERE_AND_BACK = {"embed": 0, "a": 1, "b": 2, "head": 3}
OFFSETS = {"first": 0, "a": 0, "b": 1, "head": 1}


def pipeline(scheduler: str, config: dict[str, int], micros: int = 4) -> dict[str, Any]:
    return {"pipeline": {"stages": 2, "scheduler": scheduler, "micro_batch_num": micros, "stage_config": config}}


def test_a_frozen_first_stage_silences_nobody_behind_it():
    for scheduler, config in {"zero_bubble_h1": FROZEN, "zero_bubble_v": THERE_AND_BACK,
                              "dualpipe_v": THERE_AND_BACK}.items():  # fmt: skip
        j = own("nets.FrozenFirst", ["int64", 5], stages=config, parallel=pipeline(scheduler, config))
        _, got = assert_parity(j)
        assert set(got.grads) == {"b.weight", "b.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize("scheduler", ["zero_bubble_v", "dualpipe_v", "1f1b"])
def test_a_detached_input_of_a_stage_has_a_gradient_of_zeros(scheduler):
    config = {"first": 0, "two": 1, "both": 2, "head": 3}
    parallel = pipeline(scheduler, config)
    if scheduler == "1f1b":
        parallel["pipeline"]["stages"] = 4
    assert_parity(own("split_nets.Detaching", [6], stages=config, train__batch_size=8, parallel=parallel), parts=4)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch itself, at the first jvp
@pytest.mark.parametrize("transform", ["jvp", "jacfwd"])
def test_products_within_a_transform_of_torch_func_are_not_deferred(transform):
    config = {"a": 0, "b": 1, "head": 1}
    model = {"_target_": "tests.parallel.split_nets.Derivatives", "transform": transform}
    parallel = pipeline("zero_bubble_h1", config)
    assert_parity(own("split_nets.Derivatives", [6], stages=config, model=model, parallel=parallel), parts=4)


def test_gradients_that_are_one_tensor_or_have_stride_0_are_each_added_up_alone():
    assert_parity(own("odd_nets.Added", [6], stages=OFFSETS, train__batch_size=8,
                      parallel=pipeline("zero_bubble_h1", OFFSETS)), parts=4)  # fmt: skip
    config = {"first": 0, "a": 1, "b": 2, "head": 3}
    for scheduler in ("zero_bubble_v", "dualpipe_v"):
        assert_parity(own("odd_nets.Added", [6], stages=config, train__batch_size=8,
                          parallel=pipeline(scheduler, config)), parts=4)  # fmt: skip


def test_weights_used_twice_and_parameters_in_slices_count_once_each_time():
    config = {"first": 0, "a": 0, "b": 1, "rnn": 1, "head": 1}
    four = {"first": 0, "a": 1, "b": 2, "rnn": 3, "head": 3}
    for scheduler, stages in {"zero_bubble_h1": config, "zero_bubble_v": four}.items():
        assert_parity(own("odd_nets.UsedAgain", [6], stages=stages, train__batch_size=8,
                          parallel=pipeline(scheduler, stages)), parts=4)  # fmt: skip


STAGES: dict[str, dict[str, dict[str, int]]] = {
    "split_nets.Net": {
        "one": {"embed": 0, "a": 0, "b": 1, "c": 1, "head": 1}, "two": {"embed": 0, "a": 1, "b": 2, "c": 3, "head": 3},
    },
    "split_nets.Turned": {"one": {"a": 0, "b": 1, "c": 1, "head": 1}, "two": {"a": 0, "b": 1, "c": 2, "head": 3}},
}  # fmt: skip
SHARDED: dict[str, dict[str, Any]] = {
    "whole": {},
    **{level: {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": level}} for level in ("level1", "level2")},
    "replicas, level2": {
        "hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": "level2"}, "grid": {"dp_replicate": 2},
    },
}  # fmt: skip


def odd(net: str, scheduler: str, sharded: str) -> Job:
    """5 micro batches, so that ``dualpipe_v`` ends with full backwards and all kinds of actions mix."""
    stages = STAGES[net]["one" if scheduler in ("1f1b", "zero_bubble_h1") else "two"]
    shape = ["int64", 5] if net == "split_nets.Net" else [5, 5]
    parallel = {**pipeline(scheduler, stages, 5), **SHARDED[sharded]}
    return own(net, shape, stages=stages, parallel=parallel, train__batch_size=20)


def test_weights_used_twice_and_gradients_that_lie_across_are_right_in_every_layout():
    halves = ("zero_bubble_h1", "zero_bubble_v", "dualpipe_v")
    cells = [("split_nets.Net", s, layout) for s in halves for layout in SHARDED]
    cells += [("split_nets.Turned", s, "level2") for s in ("1f1b", *halves)]
    for run in together({c: odd(*c) for c in some(cells, 3)}).values():
        run.assert_same()


def test_a_bias_of_positions_that_blocks_on_other_stages_share_is_learned_right():
    """One table is used on its own stage and its bias is passed on, as in T5."""
    one = {"embed": 0, "relative": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "head": 1}
    two = one | {"blocks.0": 1, "blocks.1": 1, "blocks.2": 2, "blocks.3": 3, "head": 3}
    stages = {"zero_bubble_h1": one, "zero_bubble_v": two, "dualpipe_v": two}
    jobs = {
        (s, layout): own("split_nets.T5Like", ["int64", 5], stages=config, train__batch_size=20,
                         parallel={**pipeline(s, config, 5), **SHARDED[layout]})
        for s, config in stages.items() for layout in ("whole", "level1", "level2")
    }  # fmt: skip
    for run in together(some_of(jobs, 3)).values():
        run.assert_same()


def rank_norms(world: World, j: Job, plan: Plan, times: int) -> list[list[float]]:
    """The norm of every gradient of this rank, in each of ``times`` runs."""
    found = []
    for _ in range(times):
        par, pipe = build(world, j, plan)
        step(j, par, pipe)
        found.append([local(p.grad).norm().item() for _, p in par.trainable() if p.grad is not None])
    return found


@exhaustive
def test_four_runs_give_the_same_bits():
    j = odd("split_nets.Net", "zero_bubble_v", "level2")
    twice = [on_ranks(4, rank_norms, j, plan_job(j), 2) for _ in range(2)]
    for rank in range(4):
        first, *others = [norms for run in twice for norms in run[rank]]
        assert first
        assert others == [first] * 3


def rank_count(world, j, plan) -> int:
    """The number of reduce-scatters of this rank in one step."""
    par, pipe = build(world, j, plan)
    with CollectiveMeter() as seen:
        step(j, par, pipe)
    return seen.count["reduce_scatter"]


@pytest.mark.parametrize(("level", "times"), [("level1", 1), ("level2", 4)])
def test_level2_reduces_after_every_micro_batch_and_level1_once(level, times):
    hsdp = {"shard_size": 2, "threshold": 0, "optimizer_level": level}
    for scheduler in ("zero_bubble_h1", "zero_bubble_v"):
        j = job(parallel={"pipeline": {"stages": 2, "scheduler": scheduler, "micro_batch_num": 4}, "hsdp": hsdp})
        plan = plan_job(j)
        groups = [sum(g.stage in plan.sizes.stages_of(pp) for g in plan.groups) for pp in (0, 0, 1, 1)]
        assert on_ranks(4, rank_count, j, plan) == [n * times for n in groups]


def test_the_plan_says_how_much_of_a_backward_waits():
    """A frozen layer defers nothing; other layers do not defer the half for input gradients."""
    plan = plan_job(own("nets.FrozenFirst", ["int64", 5], stages=FROZEN, parallel=pipeline("zero_bubble_h1", FROZEN)))
    assert [(s.flops, s.deferred) for s in plan.stages] == [(2 * 15 * 36, 0), (2 * 15 * (36 + 18), 2 * 15 * (36 + 18))]
    lines = " ".join(plan_text.text(plan).split())
    assert "0 on rank 0: embed, a; 90 parameters, 1.1 kFLOP forward a micro batch, 0% of its backward deferred" in lines
    assert "1 on rank 1: b, head; 63 parameters, 1.6 kFLOP forward a micro batch, 50% of its backward deferred" in lines
