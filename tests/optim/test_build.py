"""Optimizers, their groups, and parameters that are sharded over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from launcher.errors import RequestError
from launcher.job.schema.components import Optim
from launcher.job.schema.optim import SGD, AdamW, Lion, Momentum
from launcher.job.schema.user_class import Target
from launcher.optim.build import build_optimizer, scale_lr
from launcher.runtime.cluster.world import World
from tests.optim.grouped import grouped
from tests.ranks import on_ranks

OPTIMIZERS: dict[str, Optim] = {
    "adamw": AdamW(name="adamw", lr=0.01),
    "sgd": SGD(name="sgd", weight_decay=0.1),
    "nesterov": SGD(name="sgd", momentum=0.9, nesterov=True),
    "momentum": Momentum(name="momentum", weight_decay=0.1),
    "lion": Lion(name="lion", lr=0.01),
    "groups": Lion(name="lion", groups={"0": {"lr": 0.1}, "3.*": {"betas": [0.5, 0.5]}}),
    "own": Target(_target_="torch.optim.Adam", lr=0.01, foreach=True),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 3, bias=False)).double()


def build(settings: Optim, model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(settings, grouped(settings, model.named_parameters()), allow=("torch",))


def three_steps(model: nn.Module, settings: Optim) -> dict[str, torch.Tensor]:
    optimizer = build(settings, model)
    x = torch.arange(12, dtype=torch.float64).view(2, 6) / 12
    for step in range(3):
        scale_lr(optimizer, 1 / (step + 1))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {n: p.detach().clone() for n, p in full.items()}


def sharded(world: World) -> dict[str, Any]:
    """The network on two meshes, with a parameter that is not sharded; returns weights after the steps."""
    model, mesh = network(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    fully_shard(model[0], mesh=mesh["a"])
    fully_shard(model[2], mesh=mesh["a", "b"])
    fully_shard(model, mesh=mesh["a"], ignored_params={model[3].weight})
    kinds = {type(p) for p in model.parameters()}
    assert kinds == {nn.Parameter, DTensor}, kinds
    out = {}
    for name, settings in OPTIMIZERS.items():
        if name == "own":  # it groups the tensors itself
            continue
        with torch.no_grad():
            for p, whole in zip(model.parameters(), network().parameters(), strict=True):
                p.copy_(torch.distributed.tensor.distribute_tensor(whole, p.device_mesh, p.placements)
                        if isinstance(p, DTensor) else whole)  # fmt: skip
        out[name] = three_steps(model, settings)
    return out


def test_parameters_cut_over_ranks_mixed_with_whole_ones_train_to_the_same_weights():
    results = on_ranks(2, sharded)
    for name in OPTIMIZERS.keys() - {"own"}:
        want = three_steps(network(), OPTIMIZERS[name])
        for got in results:
            for key, tensor in got[name].items():
                torch.testing.assert_close(tensor, want[key], rtol=0, atol=1e-13, msg=f"{name} {key}")


def reference(settings: Optim, decayed: list[nn.Parameter], plain: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's own implementation that loops over single tensors."""
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    if isinstance(settings, AdamW):
        given = settings.model_dump(exclude={"name", "groups"})
        return torch.optim.AdamW(groups, **given, fused=False, foreach=False)
    given = settings.model_dump(exclude={"name", "groups"})
    return torch.optim.SGD(groups, **given, fused=False, foreach=False)


@pytest.mark.parametrize("name", ["adamw", "sgd", "nesterov", "momentum"])
def test_updates_are_those_of_torchs_plain_loop_without_decay_of_gains_and_biases(name):
    settings = OPTIMIZERS[name]
    ours, theirs = network(), network()
    params = list(theirs.parameters())
    many = [p for p in params if p.ndim > 1]
    loop = reference(settings, many, [p for p in params if p.ndim < 2])
    optimizer = build(settings, ours)
    x = torch.ones(2, 6, dtype=torch.float64)
    for _ in range(3):
        for model, step in ((ours, optimizer), (theirs, loop)):
            model(x).square().sum().backward()
            step.step()
            step.zero_grad()
    for a, b in zip(ours.parameters(), params, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_groups_are_named_and_only_matrices_decay():
    optimizer = build(OPTIMIZERS["adamw"], network())
    found = [(g["param_names"], g["weight_decay"], g["fused"]) for g in optimizer.param_groups]
    assert found == [
        (["0.weight", "2.weight", "3.weight"], 0.1, True),
        (["0.bias", "1.weight", "1.bias", "2.bias"], 0.0, True),
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rate_is_a_share_of_the_initial_one(name):
    optimizer = build(OPTIMIZERS[name], network())
    first = optimizer.param_groups[0]["lr"]
    assert scale_lr(optimizer, 0.25) == first / 4
    assert scale_lr(optimizer, 0.5) == first / 2
    assert [g["lr"] for g in optimizer.param_groups] == [g["initial_lr"] / 2 for g in optimizer.param_groups]


def test_each_group_has_its_own_settings_and_follows_the_schedule():
    own = {"0": {"lr": 0.5, "betas": [0.25, 0.5]}, "*.bias": {"eps": 1e-3}, "1.*": {"weight_decay": 0.75}}
    settings = AdamW(name="adamw", lr=0.01, groups=own)
    ours, theirs = network(), network()
    optimizer = build(settings, ours)
    of = dict(theirs.named_parameters())
    loop = torch.optim.AdamW([
        {"params": [of["0.weight"]], "lr": 0.5, "betas": (0.25, 0.5)},
        {"params": [of["0.bias"]], "lr": 0.5, "betas": (0.25, 0.5), "weight_decay": 0.0},
        {"params": [of["2.bias"]], "eps": 1e-3, "weight_decay": 0.0},
        {"params": [of["1.weight"], of["1.bias"]], "weight_decay": 0.75},
        {"params": [of["2.weight"], of["3.weight"]]},
    ], lr=0.01, betas=settings.betas, eps=settings.eps, weight_decay=0.1, fused=False, foreach=False)  # fmt: skip

    rates = [group["lr"] for group in loop.param_groups]
    x = torch.ones(2, 6, dtype=torch.float64)
    for share in (1.0, 0.5, 0.125):
        scale_lr(optimizer, share)
        for group, rate in zip(loop.param_groups, rates, strict=True):
            group["lr"] = rate * share
        for model, step in ((ours, optimizer), (theirs, loop)):
            model(x).square().sum().backward()
            step.step()
            step.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_a_class_of_the_users_own_gets_the_tensors_then_its_arguments():
    optimizer = build(OPTIMIZERS["own"], network())
    assert type(optimizer) is torch.optim.Adam
    assert [len(g["params"]) for g in optimizer.param_groups] == [7]
    assert optimizer.defaults["foreach"] is True


def test_a_class_that_is_no_optimizer_is_refused():
    with pytest.raises(RequestError) as refused:
        build(Target(_target_="torch.nn.Linear"), network())
    assert str(refused.value) == "optim._target_: torch.nn.Linear: is not a Optimizer class"
