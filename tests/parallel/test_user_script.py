"""The functions that a script calls on live models: parallelize, sync."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher.objective.losses import ClassLoss, cross_entropy
from launcher.parallel import parallelize, sync_pipeline_shared_parameters
from launcher.planner.plan_job import builder
from launcher.runtime.cluster.world import World
from launcher.runtime.training.pipeline import PipelineRuntime
from launcher.steps.certification.compare import full_tensors_on_rank_0, pieces
from tests.parallel.laid_out import SHARDED, TIED, Around, plans, spoil
from tests.parity import alone, batch, error, place
from tests.ranks import on_ranks


@pytest.mark.parametrize("given", ["a function", "a module"])
def test_a_model_laid_out_by_hand_trains_the_gradients_of_one_process(given: str) -> None:
    asked, plan = plans(SHARDED)

    def work(world: World) -> Any:
        torch.manual_seed(3)  # a module brings its own numbers, equal on all ranks
        net = parallelize(builder(asked) if given == "a function" else double(builder(asked)()), plan)
        before = full_tensors_on_rank_0(plan, pieces(net.live, weights=True))
        xs, y = batch(asked, plan)
        mine = slice(place(plan, net.live.meshes) * plan.sizes.local_batch, None)
        n = plan.sizes.local_batch
        pipe = PipelineRuntime(net.live, plan.inputs, ClassLoss(), torch.device("cpu"))
        pipe.step(tuple(x[mine][:n] for x in xs), y[mine][:n])
        return before, full_tensors_on_rank_0(plan, pieces(net.live))

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


@pytest.mark.parametrize("around", [False, True], ids=["itself", "in a wrapper"])
def test_copies_on_all_stages_are_equal_after_sync_whatever_they_held(around: bool) -> None:
    asked, plan = plans(SHARDED)

    def work(world: World) -> Any:
        net = parallelize(builder(asked), plan)
        spoil(net, world.rank // 4 * 10)  # equal on replicas, different between stages
        before = full_tensors_on_rank_0(plan, pieces(net.live, weights=True))
        sync_pipeline_shared_parameters(Around(net) if around else net)
        return before, full_tensors_on_rank_0(plan, pieces(net.live, weights=True))

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
        "net: dict is not a torch.nn.Module",
        "net: Linear is not a result of launcher.parallel.parallelize, nor a wrapper of one",
        "net: Around is not a result of launcher.parallel.parallelize, nor a wrapper of one",
    ]


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
        "plan: it has 4 ranks, but the process group has 1",
        "model: embed.weight is on the meta device and has no values; pass a function that builds the model",
    )
