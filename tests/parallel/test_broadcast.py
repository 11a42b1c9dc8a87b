"""A broadcast makes replicas equal, whatever form their layouts have, or says what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.checkpoint import build_searched_strategy
from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.layout.derive_strategy import strategy_of_plan
from launcher.checkpoint.layout.strategy import Strategy
from launcher.errors import RunError
from launcher.extras.mindspore.merge_strategies import merged_file
from launcher.extras.mindspore.strategy_file import write_strategy
from launcher.parallel import broadcast as sending
from launcher.parallel import parallelize, parameter_broadcast
from launcher.parallel.local_tensors import local
from launcher.plan.plan import Plan
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from launcher.planner.plan_job import builder
from launcher.runtime.cluster.world import World
from tests.parallel.laid_out import SHARDED, TIED, Around, plans, spoil
from tests.ranks import on_ranks
from tests.tiers import some


def of_the_plan(plan: Plan, folder: Path) -> Any:
    return {p.name: p.layout for p in plan.params}


def of_our_file(plan: Plan, folder: Path) -> Any:
    strategy = strategy_of_plan(plan)
    (folder / "s.json").write_text(strategy_file.text(strategy, tuple(range(strategy.stages))))
    return build_searched_strategy(str(folder / "s.json"))


def of_mindspores_file(plan: Plan, folder: Path) -> Any:
    write_strategy(folder / "s.ckpt", merged_file(strategy_of_plan(plan)), "protobuf")
    return build_searched_strategy(str(folder / "s.ckpt"))


def of_mindspores_json(plan: Plan, folder: Path) -> Any:
    write_strategy(folder / "s.json", merged_file(strategy_of_plan(plan)), "json")
    return build_searched_strategy(str(folder / "s.json"))


def of_matrices(plan: Plan, folder: Path) -> Any:
    """The JSON of a strategy file in which each tensor has its own device matrix."""
    strategy = strategy_of_plan(plan)
    moved = {}
    for i, (name, entry) in enumerate(strategy.entries.items()):
        axes = [(axis, n) for axis, n in strategy.grid.axes if n > 1 or axis == "pp"]
        named = {axis: axis if axis == "pp" else f"{axis}_{i}" for axis, _ in axes}
        split = tuple(tuple(named[a] for a in dim if a in named) for dim in entry.layout.split)
        grid = Grid(tuple((named[axis], n) for axis, n in axes))
        moved[name] = replace(entry, layout=replace(entry.layout, grid=grid, split=split))
    own = Strategy(strategy.grid, moved)
    return json.loads(strategy_file.text(own, tuple(range(own.stages))))


def of_json(plan: Plan, folder: Path) -> Any:
    return json.loads(strategy_file.text(strategy_of_plan(plan), tuple(range(plan.sizes.grid["pp"]))))


FORMS: dict[str, tuple[dict[str, Any], Callable[[Plan, Path], Any]]] = {
    "whole, of the plan": (TIED, of_the_plan),
    "sharded, of the plan": (SHARDED, of_the_plan),
    "sharded, a strategy": (SHARDED, lambda plan, _: strategy_of_plan(plan)),
    "sharded, its entries": (SHARDED, lambda plan, _: strategy_of_plan(plan).entries),
    "sharded, a file": (SHARDED, of_our_file),
    "sharded, MindSpore's file": (SHARDED, of_mindspores_file),
    "sharded, MindSpore's JSON": (SHARDED, of_mindspores_json),
    "sharded, JSON": (SHARDED, of_json),
    "sharded, device matrices": (SHARDED, of_matrices),
}


@pytest.mark.parametrize(("parallel", "form"), some(FORMS.values()), ids=some(FORMS))
def test_a_broadcast_makes_replicas_equal_to_the_first_in_few_collectives(
    parallel: dict[str, Any], form: Any, tmp_path: Path
) -> None:
    asked, plan = plans(parallel)
    layout = form(plan, tmp_path)

    def work(world: World) -> Any:
        net = parallelize(builder(asked), plan)
        spoil(net, world.rank)
        kept = {n: local(same[0]).clone() for n, same in net.copies().items()}
        first = plan.sizes.grid.ranks(pp=plan.sizes.grid.coords(world.rank)["pp"])[0]
        sent = parameter_broadcast(Around(net), layout, world.rank, first)
        return sent, kept, {n: local(same[0]).clone() for n, same in net.copies().items()}

    ranks = on_ranks(plan.sizes.grid.size, work)
    layouts = {p.name: p.layout for p in plan.params}
    for rank, (sent, kept, got) in enumerate(ranks):
        assert sent.collectives == 1
        assert sent.nbytes == sum(t.nbytes for t in kept.values())
        for name, t in got.items():
            first = layouts[name].twins(rank)[0]
            assert torch.equal(t, ranks[first][1][name]), (rank, name)
            assert first == rank or not torch.equal(t, kept[name])


def test_replicas_are_those_of_each_tensors_own_device_matrix() -> None:
    layout = {
        "w": Layout(Grid.of(x=2, y=2), (2,), (("x",),)),  # copies on ranks 0 and 1, 2 and 3
        "v": Layout(Grid.of(a=2, b=2), (2,), (("b",),)),  # on 0 and 2, 1 and 3
        "u": Layout(Grid.of(x=2, y=2), (4,), (("y", "x"),)),  # no copies
        "t": Layout(Grid.of(all=4), (1,), ((),)),
        "s": Layout(Grid.of(c=2, d=2), (2,), (("c",),)),  # the same as w
    }

    def work(world: World) -> Any:
        net = nn.ParameterDict({name: torch.full((1,), float(world.rank)) for name in layout})
        sent = parameter_broadcast(net, layout, world.rank)
        return sent.collectives, {name: int(t) for name, t in net.items()}

    got = on_ranks(4, work)
    assert [n for n, _ in got] == [3] * 4
    first = {"w": [0, 0, 2, 2], "v": [0, 1, 0, 1], "u": [0, 1, 2, 3], "t": [0] * 4, "s": [0, 0, 2, 2]}
    assert {name: [held[name] for _, held in got] for name in layout} == first


WRONG: dict[str, tuple[Callable[[int, int, dict[str, Any]], tuple[int, int, dict[str, Any]]], str]] = {
    "another rank": (lambda rank, first, lay: (rank + 1, first, lay), "cur_rank: 1 is not the rank of this process, 0"),
    "another stage": (
        lambda rank, first, lay: (rank, first + 1, lay),
        "initial_rank: 1 is not the first rank of the stage of rank 0, 0",
    ),
    "an unknown name": (
        lambda rank, first, lay: (rank, first, {**lay, "there": lay["embed.weight"]}),
        "layout: net has no parameter there on rank 0; it has ",
    ),
    "another world": (
        lambda rank, first, lay: (rank, first, {"embed.weight": Layout(Grid.of(pp=1), (65, 16), ((), ()))}),
        "layout: it describes 1 ranks, but the process group has 4",
    ),
}


@pytest.mark.parametrize(("change", "said"), list(WRONG.values()), ids=list(WRONG))
def test_a_broadcast_of_what_does_not_fit_is_refused(change: Any, said: str) -> None:
    asked, plan = plans(TIED)

    def work(world: World) -> str:
        net = parallelize(builder(asked), plan)
        first = plan.sizes.grid.ranks(pp=plan.sizes.grid.coords(world.rank)["pp"])[0]
        rank, initial, layout = change(world.rank, first, {p.name: p.layout for p in plan.params})
        with pytest.raises(ValueError, match="rank") as caught:
            parameter_broadcast(net, layout, rank, initial)
        return str(caught.value)

    assert on_ranks(plan.sizes.grid.size, work)[0].startswith(said)


def test_a_layout_that_would_put_one_shard_over_another_is_refused() -> None:
    asked, plan = plans(SHARDED)
    other = {p.name: replace(p.layout, split=((),) * len(p.spec.shape)) for p in plan.params}

    def work(world: World) -> str:
        net = parallelize(builder(asked), plan)
        first = plan.sizes.grid.ranks(pp=plan.sizes.grid.coords(world.rank)["pp"])[0]
        with pytest.raises(ValueError, match="replicates it on") as caught:
            parameter_broadcast(net, other, world.rank, first)
        return str(caught.value)

    said = on_ranks(plan.sizes.grid.size, work)
    want = "layout: embed.weight is replicated on ranks [0, 1, 2, 3], but net replicates it on [0, 2]"
    assert said[0] == want


def test_a_layout_that_is_none_is_a_type_error_that_says_how_to_read_one() -> None:
    text = "layout: expected a mapping of names to layouts, got str; "
    text += "launcher.checkpoint.build_searched_strategy reads one from a file"
    for wrong, said in (("s.ckpt", text), ({"w": [1]}, "layout: w: list is not a layout")):
        with pytest.raises(TypeError) as caught:
            parameter_broadcast(nn.Linear(2, 2), wrong)
        assert str(caught.value) == said


def test_a_broadcast_of_something_that_is_no_module_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"^net: list is not a torch\.nn\.Module$"):
        parameter_broadcast([], {})  # type: ignore[arg-type]


def test_a_broadcast_that_loses_a_tensor_names_it_and_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plan = plans(TIED)
    real = sending._send

    def wrong(group_batch: Any, group: Any) -> int:
        return real(group_batch[:-1], group)

    monkeypatch.setattr(sending, "_send", wrong)

    def work(world: World) -> str:
        net = parallelize(builder(asked), plan)
        spoil(net, world.rank)
        first = plan.sizes.grid.ranks(pp=plan.sizes.grid.coords(world.rank)["pp"])[0]
        with pytest.raises(RunError) as caught:
            parameter_broadcast(net, {p.name: p.layout for p in plan.params}, world.rank, first)
        return str(caught.value)

    said = on_ranks(plan.sizes.grid.size, work)
    assert said[0] == said[1] == "after the broadcast, layers.1.mlp.down.weight on rank 1 differs from rank 0's"
    assert said[2] == said[3] == "after the broadcast, norm.weight on rank 3 differs from rank 2's"
