"""The effect of the three HSDP levels on memory, observed in a running step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from launcher.parallel import mesh
from launcher.plan.cut.tensor_placement import Tie
from launcher.plan.values.grid import Grid
from launcher.planner.plan_job import plan_job
from tests.parity import assert_parity, build, job, own, step
from tests.ranks import on_ranks

LEVELS = ("level1", "level2", "level3")


def rank_watch(world, j, plan) -> tuple[list[bool], list[bool], list[bool]]:
    """For each micro batch: was the weight a shard after forward and after backward, had it a gradient?

    In the last backward level1 reshards weights, too; the shard has a gradient once it is reduced.
    """
    par, pipe = build(world, j, plan)
    (stage,), (part,) = pipe._train._stages, par.parts
    name = "layers.1.mlp.up.weight"
    shard = dict(par.trainable())[name]
    after_forward, after_backward, reduced = [], [], []

    def sharded() -> bool:
        return isinstance(part.module.get_parameter(name), DTensor)

    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk

    def watched_forward(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        after_forward.append(sharded())
        return out

    def watched_backward(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        after_backward.append(sharded())
        reduced.append(shard.grad is not None)

    stage.forward_one_chunk, stage.backward_one_chunk = watched_forward, watched_backward
    step(j, par, pipe)
    assert shard.grad is not None
    return after_forward, after_backward, reduced


@pytest.mark.parametrize("level", LEVELS)
def test_levels_differ_in_when_weights_and_gradients_are_whole(level):
    hsdp = {"shard_size": 2, "threshold": 0, "optimizer_level": level}
    j = job(parallel={"hsdp": hsdp, "pipeline": {"micro_batch_num": 3}}, train__batch_size=12)
    again, each = level == "level3", level != "level1"
    assert on_ranks(2, rank_watch, j, plan_job(j)) == [([again] * 3, [again, again, level != "level2"], [each] * 3)] * 2


def rank_groups(world) -> list[list[int]]:
    grid = Grid.of(pp=2, dp_replicate=2, dp_shard=2, tp=1)
    found = mesh.build(grid, "cpu", [Tie("a", (0, 1), (0, 1)), Tie("b", (0, 1), (0, 1))])
    assert found.shard.size() == 4
    groups = (found.pp, found.dp, *found.ties.values())
    return [torch.distributed.get_process_group_ranks(g) for g in groups]


def test_groups_are_the_rows_of_the_grid():
    found = on_ranks(8, rank_groups)
    assert found[5] == [[1, 5], [4, 5, 6, 7], [1, 5]]
    assert found[2] == [[2, 6], [0, 1, 2, 3], [2, 6]]


def test_an_output_that_is_a_view_may_be_changed_in_place():
    hsdp = {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}
    assert_parity(own("nets.Residual", [4, 6], stages=1, parallel={"hsdp": hsdp}))
