from __future__ import annotations

from typing import Any

import pytest

from launcher.checkpoint import Entry, Strategy, single, target_strategy
from launcher.errors import RequestError
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.saving import small


def at(strategy: Strategy) -> dict[str, Any]:
    return {name: (e.layout.axes, dict(e.layout.at)["pp"]) for name, e in strategy.entries.items()}


def test_the_target_is_the_grid_in_the_order_of_a_job() -> None:
    assert target_strategy(small(), nproc=8, stages=2, shard_size=2).grid == Grid.of(
        pp=2, dp_replicate=2, dp_shard=2, tp=1
    )


def test_merging_stages_cuts_the_tensors_that_the_source_cuts() -> None:
    assert at(target_strategy(small(), nproc=3, stages=1, shard_size=3)) == {
        "embed.weight": (("dp_shard",), (0,)),
        "layer.weight": (("dp_shard",), (0,)),
        "layer.mean": ((), (0,)),
        "optim.embed.weight.exp_avg": (("dp_shard",), (0,)),
        "optim.step": ((), (0,)),
    }


def test_a_tied_tensor_goes_to_every_stage_that_it_belongs_to() -> None:
    grid = Grid.of(pp=4)
    src = Strategy(grid, {"w": Entry(Layout(grid, (2,), ((),), (("pp", (0, 3)),)), "int8"),
                          "v": Entry(Layout(grid, (2,), ((),), (("pp", (2,)),)), "int8"),
                          "step": Entry(Layout(grid, (), ()), "int8")})  # fmt: skip
    got = target_strategy(src, nproc=2, stages=2, shard_size=1)
    assert at(got) == {"w": ((), (0, 1)), "v": ((), (1,)), "step": ((), (0, 1))}


def test_if_the_source_is_uncut_only_its_large_parameters_are_sharded() -> None:
    grid = Grid.of(rank=1)
    layouts = {"large": (256, 64), "small": (255, 64), "mean": (256, 64), "count": ()}
    src = Strategy(grid, {n: Entry(Layout(grid, s, ((),) * len(s)), "float32", "buffer" if n == "mean" else "param")
                          for n, s in layouts.items()})  # fmt: skip
    got = target_strategy(src, nproc=2, stages=1, shard_size=2)
    assert {n: e.layout.axes for n, e in got.entries.items()} == {
        "large": ("dp_shard",), "small": (), "mean": (), "count": ()
    }  # fmt: skip


def test_a_shard_size_of_one_cuts_no_tensor() -> None:
    got = target_strategy(small(), nproc=2, stages=2, shard_size=1)
    assert {e.layout.axes for e in got.entries.values()} == {()}


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ({"nproc": 3, "stages": 2, "shard_size": 1},
         ["steps.transform.nproc: 3: does not divide into 2 stages x 1 shard (try: steps.transform.nproc=4)"]),
        ({"nproc": 3, "stages": 3, "shard_size": 2},
         ["steps.transform.stages: 3: cannot be made from 2 stages; stages are merged, not cut"
          " (try: steps.transform.stages=2)",
          "steps.transform.nproc: 3: does not divide into 2 stages x 2 shards (try: steps.transform.nproc=4)"]),
        ({"nproc": 0, "stages": 1, "shard_size": -1},
         ["steps.transform.nproc: 0: must be at least 1 (try: steps.transform.nproc=1)",
          "steps.transform.shard_size: -1: must be at least 1 (try: steps.transform.shard_size=1)"]),
    ],
    ids=["nproc", "stages", "positive"],
)  # fmt: skip
def test_every_problem_of_a_target_is_listed(words: dict[str, int], texts: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        target_strategy(small(), **words)
    assert [str(p) for p in caught.value.problems] == texts


def test_a_target_of_one_rank_has_the_layouts_of_single() -> None:
    words, plain = target_strategy(small(), nproc=1, stages=1, shard_size=1), single(small())
    assert {n: e.layout.box(0) for n, e in words.entries.items()} == {
        n: e.layout.box(0) for n, e in plain.entries.items()
    }
