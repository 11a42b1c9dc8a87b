"""The functions that a script calls on live models: parallelize, sync, broadcast."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher.checkpoint import build_searched_strategy
from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.layout.derived import of_plan
from launcher.checkpoint.mindspore.formats import merged_file, write_strategy
from launcher.errors import RunError
from launcher.models.loss import cross_entropy
from launcher.parallel import broadcast as sending
from launcher.parallel import parallelize, parameter_broadcast, sync_pipeline_shared_parameters
from launcher.parallel.api import Net
from launcher.parallel.local import local
from launcher.plan.plan import Plan
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from launcher.planner.plan_job import builder, plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training.pipeline import Pipeline
from launcher.steps.certification.gather_full import gathered, pieces
from tests.parity import alone, batch, error, job, place
from tests.ranks import on_ranks
from tests.tiers import some

TIED: dict[str, Any] = {"pipeline": {"stages": 2}, "grid": {"dp_replicate": 2}}
SHARDED: dict[str, Any] = {"pipeline": {"stages": 2}, "hsdp": {"shard_size": 2, "threshold": 0},
                           "grid": {"dp_replicate": 2}}  # fmt: skip
SMALL = {"model__layers": 2}


def plans(parallel: dict[str, Any], **changes: Any) -> tuple[Any, Plan]:
    asked = job(parallel=parallel, **SMALL, **changes)
    return asked, plan_job(asked)


def spoil(net: Net, rank: int) -> None:
    """Other numbers on every rank."""
    with torch.no_grad():
        for same in net.copies().values():
            for n, t in enumerate(same):
                local(t).copy_(local(t) + (rank + 1) * (n + 1))


@pytest.mark.parametrize("given", ["a function", "a module"])
def test_a_model_laid_out_by_hand_trains_the_gradients_of_one_process(given: str) -> None:
    asked, plan = plans(SHARDED)

    def work(world: World) -> Any:
        torch.manual_seed(3)  # the numbers of a module are its own
        net = parallelize(builder(asked) if given == "a function" else double(builder(asked)()), plan)
        before = gathered(plan, pieces(net.live, weights=True))
        xs, y = batch(asked, plan)
        mine = slice(place(plan, net.live.meshes) * plan.sizes.local_batch, None)
        n = plan.sizes.local_batch
        pipe = Pipeline(net.live, plan.inputs, cross_entropy, torch.device("cpu"))
        pipe.step(tuple(x[mine][:n] for x in xs), y[mine][:n])
        return before, gathered(plan, pieces(net.live))

    before, grads = on_ranks(plan.sizes.grid.size, work)[0]
    if given == "a function":
        want = alone(asked, plan).grads
    else:
        torch.manual_seed(3)
        model = double(builder(asked)())
        xs, y = batch(asked, plan)
        cross_entropy(model(*xs), y).backward()
        named = dict(model.named_parameters())
        want = {n: named[n].grad for n in before.tensors}  # type: ignore[misc]
        assert max(error(before.tensors[n], named[n].detach()) for n in want) == 0
    assert not grads.complaints
    assert grads.tensors.keys() == want.keys()
    assert max(error(grads.tensors[n], g) for n, g in want.items()) <= 1e-12


def double(model: nn.Module) -> nn.Module:
    return model.double()


class Around(nn.Module):
    """What scripts wrap a model in: a loss beside it, a level of names above it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"_backbone": net})


@pytest.mark.parametrize("around", [False, True], ids=["itself", "in a wrapper"])
def test_copies_on_all_stages_are_equal_after_sync_whatever_they_held(around: bool) -> None:
    asked, plan = plans(SHARDED)

    def work(world: World) -> Any:
        net = parallelize(builder(asked), plan)
        spoil(net, world.rank // 4 * 10)  # replicas alike, stages not
        before = gathered(plan, pieces(net.live, weights=True))
        sync_pipeline_shared_parameters(Around(net) if around else net)
        return before, gathered(plan, pieces(net.live, weights=True))

    before, after = on_ranks(plan.sizes.grid.size, work)[0]
    assert {c.split(":")[0] for c in before.complaints} == {"embed.weight"}
    assert after.complaints == ()


def test_sync_does_nothing_to_a_model_of_one_stage_and_refuses_what_is_none() -> None:
    asked, plan = plans({"pipeline": {"stages": 1}})

    def work(world: World) -> list[str]:
        net = parallelize(builder(asked), plan)
        before = [t.clone() for t in net.parameters()]
        sync_pipeline_shared_parameters(net)
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        said = []
        for wrong in ({"weight": before}, nn.Linear(2, 2), Around(nn.Linear(2, 2))):
            with pytest.raises(TypeError, match="net: ") as caught:
                sync_pipeline_shared_parameters(wrong)  # type: ignore[arg-type]
            said.append(str(caught.value))
        return said

    assert on_ranks(1, work)[0] == [
        "net: dict is no torch.nn.Module",
        "net: Linear is not what launcher.parallel.parallelize gave, nor around it",
        "net: Around is not what launcher.parallel.parallelize gave, nor around it",
    ]


def of_the_plan(plan: Plan, folder: Path) -> Any:
    return {p.name: p.layout for p in plan.params}


def of_our_file(plan: Plan, folder: Path) -> Any:
    strategy = of_plan(plan)
    (folder / "s.json").write_text(strategy_file.text(strategy, tuple(range(strategy.stages))))
    return build_searched_strategy(str(folder / "s.json"))


def of_mindspores_file(plan: Plan, folder: Path) -> Any:
    write_strategy(folder / "s.ckpt", merged_file(of_plan(plan)), "protobuf")
    return build_searched_strategy(str(folder / "s.ckpt"))


def of_json(plan: Plan, folder: Path) -> Any:
    return json.loads(strategy_file.text(of_plan(plan), tuple(range(plan.sizes.grid["pp"]))))


FORMS: dict[str, tuple[dict[str, Any], Callable[[Plan, Path], Any]]] = {
    "whole, of the plan": (TIED, of_the_plan),
    "sharded, of the plan": (SHARDED, of_the_plan),
    "sharded, a strategy": (SHARDED, lambda plan, _: of_plan(plan)),
    "sharded, its entries": (SHARDED, lambda plan, _: of_plan(plan).entries),
    "sharded, a file": (SHARDED, of_our_file),
    "sharded, MindSpore's file": (SHARDED, of_mindspores_file),
    "sharded, JSON": (SHARDED, of_json),
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


WRONG: dict[str, tuple[Callable[[int, int, dict[str, Any]], tuple[int, int, dict[str, Any]]], str]] = {
    "another rank": (lambda rank, first, lay: (rank + 1, first, lay), "cur_rank: 1 is not the rank of this process, 0"),
    "another stage": (
        lambda rank, first, lay: (rank, first + 1, lay),
        "initial_rank: 1 is not the first rank of the stage of rank 0, 0",
    ),
    "an unknown name": (
        lambda rank, first, lay: (rank, first, {**lay, "there": lay["embed.weight"]}),
        "layout: there is not a parameter of net on rank 0, which has ",
    ),
    "another world": (
        lambda rank, first, lay: (rank, first, {"embed.weight": Layout(Grid.of(pp=1), (65, 16), ((), ()))}),
        "layout: it is for 1 ranks, the process group has 4",
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
        with pytest.raises(ValueError, match="hold the same") as caught:
            parameter_broadcast(net, other, world.rank, first)
        return str(caught.value)

    said = on_ranks(plan.sizes.grid.size, work)
    want = "layout: it has ranks [0, 1, 2, 3] hold the same of embed.weight, of net it is [0, 2]"
    assert said[0] == want


def test_a_layout_that_is_none_is_a_type_error_that_says_how_to_read_one() -> None:
    text = "layout: expected a mapping of names to layouts, got str; "
    text += "launcher.checkpoint.build_searched_strategy reads one from a file"
    for wrong, said in (("s.ckpt", text), ({"w": [1]}, "layout: w: list is no layout")):
        with pytest.raises(TypeError) as caught:
            parameter_broadcast(nn.Linear(2, 2), wrong)
        assert str(caught.value) == said


def test_a_broadcast_of_something_that_is_no_module_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"^net: list is no torch\.nn\.Module$"):
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
    assert said[0] == said[1] == "after the broadcast layers.0.mlp.down.weight on rank 1 is not rank 0's"
    assert said[2] == said[3] == "after the broadcast norm.weight on rank 3 is not rank 2's"


def test_a_plan_of_another_number_of_ranks_and_a_module_without_numbers_are_refused() -> None:
    asked, plan = plans({"pipeline": {"stages": 1}})
    _, other = plans(TIED)

    def work(world: World) -> tuple[str, str]:
        assert dist.get_world_size() == 1
        with pytest.raises(ValueError, match="plan") as sizes:
            parallelize(builder(asked), other)
        with torch.device("meta"):
            model = builder(asked)()
        with pytest.raises(ValueError, match="meta") as meta:
            parallelize(model, plan)
        return str(sizes.value), str(meta.value)

    assert on_ranks(1, work)[0] == (
        "plan: it has 4 ranks, the process group 1",
        "model: embed.weight is on the meta device and has no numbers; hand over a function that builds it",
    )
