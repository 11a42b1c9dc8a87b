"""Backwards cut into input and weight gradients, on modules that torch's own way of cutting gets wrong."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

from launcher.decide import plan_job
from tests.parity import assert_parity, build, job, own, step
from tests.ranks import on_ranks

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


def rank_count(world, j, plan) -> int:
    """How often this rank reduces and scatters in one step."""
    par, pipe = build(world, j, plan)
    found, real = [], fsdp.foreach_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return real(*args, **kwargs)

    fsdp.foreach_reduce = counted  # in a process of its own
    step(j, par, pipe)
    return len(found)


@pytest.mark.parametrize(("level", "times"), [("level1", 1), ("level2", 4)])
def test_level2_reduces_after_every_micro_batch_and_level1_once(level, times):
    hsdp = {"shard_size": 2, "threshold": 0, "optimizer_level": level}
    for scheduler in ("zero_bubble_h1", "zero_bubble_v"):
        j = job(parallel={"pipeline": {"stages": 2, "scheduler": scheduler, "micro_batch_num": 4}, "hsdp": hsdp})
        plan = plan_job(j)
        groups = [sum(g.stage in plan.sizes.held(pp) for g in plan.groups) for pp in (0, 0, 1, 1)]
        assert on_ranks(4, rank_count, j, plan) == [n * times for n in groups]
