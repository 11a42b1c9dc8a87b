"""Adafactor and Muon in every layout, compared with torch's own classes in one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.job.schema.components import Optim
from launcher.job.schema.job import Job
from launcher.job.schema.optim import Adafactor, Muon
from launcher.optim import adafactor
from launcher.optim.build import build_optimizer
from launcher.plan.cut.param_groups import param_groups
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.steps.certification.compare import Piece, error
from tests.optim.grouped import grouped, tensor
from tests.parity import LM, TOKENS, accumulate, batch, job, plain, rank_train, whole
from tests.ranks import on_ranks
from tests.test_parity_tp import MEGATRON

STEPS = 4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adafactor": {"name": "adafactor", "lr": 0.05, "weight_decay": 0.1, "d": 1.5},
    "muon": {"name": "muon", "lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "adamw": {"lr": 0.01}},
}
UNEVEN = {"model": LM | {"vocab_size": 63, "layers": 2}, "data": TOKENS | {"vocab_size": 63}}


def hsdp(level: str, shard: int = 2) -> dict[str, Any]:
    return {"shard_size": shard, "threshold": 0, "optimizer_level": level, "uneven": "pad"}


LAYOUTS: dict[str, dict[str, Any]] = {
    "2 stages, tied": {"pipeline": {"stages": 2}},
    "level1": {"hsdp": hsdp("level1")},
    "level2": {"hsdp": hsdp("level2")},
    "level3": {"hsdp": hsdp("level3")},
    "tp 2": {"operators": MEGATRON, "grid": {"tp": 2}},
    "shard 2 x tp 2": {"operators": MEGATRON, "grid": {"tp": 2}, "hsdp": hsdp("level1")},
    "2 stages x shard 2, tied": {"pipeline": {"stages": 2}, "hsdp": hsdp("level1")},
    "shard 4": {"hsdp": hsdp("level1", 4)},
    "5 rows over 4, one rank without": {"hsdp": hsdp("level2", 4)},
    "replicate 2 x shard 2": {"hsdp": hsdp("level1"), "grid": {"dp_replicate": 2}},
}


def of(layout: str, optim: str) -> Job:
    model = UNEVEN if "tp" not in layout else {"model": LM | {"layers": 2}}
    if "5 rows" in layout:
        model = {"model": {"name": "tied_pair", "vocab_size": 5, "dim": 3}, "data": TOKENS | {"vocab_size": 5}}
    settings = OPTIMIZERS[optim]
    if "5 rows" in layout and optim == "muon":
        settings = settings | {"groups": {"embed": {"use": "muon"}}}
    return job(parallel=LAYOUTS[layout], optim=settings, train__batch_size=8, **model)


def rank_trains(world: World, jobs: list[tuple[Job, Plan]]) -> list[list[Piece]]:
    return [rank_train(world, j, plan, STEPS, 1e9) for j, plan in jobs]


@cache
def under_layouts() -> dict[tuple[str, str], dict[str, Tensor]]:
    """The weights after the steps; ranks are forked once per world size."""
    cells = {(layout, optim): of(layout, optim) for layout in LAYOUTS for optim in OPTIMIZERS}
    plans = {key: plan_job(j) for key, j in cells.items()}
    out = {}
    for size in {p.sizes.grid.size for p in plans.values()}:
        mine = [key for key, p in plans.items() if p.sizes.grid.size == size]
        ranks = on_ranks(size, rank_trains, [(cells[k], plans[k]) for k in mine])
        for i, key in enumerate(mine):
            out[key] = whole(plans[key], [piece for held in ranks for piece in held[i]])
    return out


def torchs(settings: Optim, model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's own optimizers, without weight decay for vectors."""
    named = dict(model.named_parameters())
    if isinstance(settings, Adafactor):
        groups = [{"params": [p], "weight_decay": settings.weight_decay if p.ndim > 1 else 0.0} for p in named.values()]
        return [torch.optim.Adafactor(groups, lr=settings.lr, d=settings.d, foreach=False)]
    assert isinstance(settings, Muon)
    rest = settings.adamw
    apart = () if settings.groups else ("embed", "head")
    matrices = [n for n, p in named.items() if p.ndim == 2 and not n.startswith(apart)]
    others = [{"params": [p], "weight_decay": rest.weight_decay if p.ndim > 1 else 0.0}
              for n, p in named.items() if n not in matrices]  # fmt: skip
    first = torch.optim.Muon([named[n] for n in matrices], lr=settings.lr, adjust_lr_fn=settings.adjust_lr_fn)
    if not others:
        return [first]
    return [first, torch.optim.AdamW(others, lr=rest.lr, betas=rest.betas, eps=rest.eps, foreach=False)]


def train(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module, j: Job, plan: Plan) -> dict[str, Tensor]:
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        accumulate(model, *batch(j, plan), 1)
        for optimizer in optimizers:
            optimizer.step()
    mine = dict(model.named_parameters())
    return {p.name: mine[p.name].detach() for p in plan.params}


@pytest.fixture
def iterates_in_the_dtype_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Muon casts to bfloat16; a different rounding before the cast would change the step after it."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


@pytest.mark.usefixtures("iterates_in_the_dtype_of_weights")
@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_after_some_steps_are_those_of_torchs_own_class_in_one_process(layout: str, optim: str) -> None:
    j = of(layout, optim)
    plan = plan_job(j)
    model = plain(j, plan)
    want = train(torchs(j.optim, model), model, j, plan)
    got = under_layouts()[layout, optim]
    assert got.keys() == want.keys()
    off = {n: error(got[n], w) for n, w in want.items()}
    assert max(off.values()) <= 1e-12, off


def test_sums_that_no_rank_adds_up_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adafactor, "add_up", lambda terms: [*terms])
    j = of("level3", "adafactor")
    plan = plan_job(j)
    ranks = on_ranks(2, rank_train, j, plan, STEPS, 1e9)
    model = plain(j, plan)
    want = train(torchs(j.optim, model), model, j, plan)
    got = whole(plan, [p for held in ranks for p in held])
    assert max(error(got[n], w) for n, w in want.items()) > 1e-3


def network() -> nn.ModuleDict:
    """A tall matrix, a wide one, a convolution kernel, gains and a scalar."""
    torch.manual_seed(0)
    linear = {"tall": nn.Linear(3, 7, bias=False), "wide": nn.Linear(9, 4)}
    net = nn.ModuleDict(linear | {"kernel": nn.Conv2d(2, 3, 2), "norm": nn.LayerNorm(5)})
    net.register_parameter("scalar", nn.Parameter(torch.tensor(0.5)))
    return net


def gradients(net: nn.Module, step: int) -> None:
    g = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype) * 10**step


@pytest.mark.parametrize("eps", [(None, 1e-3), (1e-3, 0.5)], ids=["eps of the dtype", "larger eps"])
def test_adafactor_of_tensors_of_all_dims_is_torchs(eps: tuple[float | None, float]) -> None:
    settings = Adafactor(name="adafactor", lr=0.5, weight_decay=0.1, d=2.0, beta2_decay=-0.5, eps=eps)
    ours, theirs = network().double(), network().double()
    named = [(n, tensor(n, shape=tuple(p.shape))) for n, p in ours.named_parameters()]
    placed = [replace(t, spec=replace(t.spec, dtype="float64"), compute="float64") for _, t in named]
    of = dict(ours.named_parameters())
    found = [(g, [(n, of[n]) for n in g.names]) for g in param_groups(settings, placed)]
    optimizer = build_optimizer(settings, found)
    groups = [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in theirs.parameters()]
    loop = torch.optim.Adafactor(groups, lr=0.5, d=2.0, beta2_decay=-0.5, eps=eps, foreach=False)
    for step in range(3):
        for net, one in ((ours, optimizer), (theirs, loop)):
            gradients(net, step)
            one.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    kept = {k: tuple(t.shape) for k, t in optimizer.state[of["kernel.weight"]].items()}
    assert kept == {"step": (), "row_var": (3, 2, 2, 1), "col_var": (3, 2, 1, 2)}


@pytest.mark.parametrize("how", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_in_half_precision_is_torchs_to_the_bit(how: Any, nesterov: bool) -> None:
    settings = Muon(name="muon", lr=0.5, adjust_lr_fn=how, nesterov=nesterov, groups={"wide": {"momentum": 0.5}})
    ours, theirs = network(), network()
    placed = [replace(tensor(n, shape=tuple(p.shape)), compute="bfloat16") for n, p in ours.named_parameters()]
    of = dict(ours.named_parameters())
    optimizer = build_optimizer(settings, [(g, [(n, of[n]) for n in g.names]) for g in param_groups(settings, placed)])
    groups = [{"params": [theirs["tall"].weight]}, {"params": [theirs["wide"].weight], "momentum": 0.5}]
    loop = torch.optim.Muon(groups, lr=0.5, adjust_lr_fn=how, nesterov=nesterov)
    for step in range(3):
        for net, one in ((ours, optimizer), (theirs, loop)):
            gradients(net, step)
            one.step()
    for name in ("tall", "wide"):
        assert torch.equal(ours[name].weight, theirs[name].weight)
    assert {*optimizer.state[of["tall.weight"]]} == {"momentum_buffer"}
    assert {*optimizer.state[of["kernel.weight"]]} == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_a_parameter_without_a_gradient_is_unchanged_and_has_no_state(optim: str) -> None:
    settings: Optim = Adafactor.model_validate(OPTIMIZERS[optim]) if optim == "adafactor" else Muon(name="muon")
    p, idle = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    empty = nn.Parameter(torch.ones(0, 3))
    optimizer = build_optimizer(settings, grouped(settings, [("p", p), ("idle", idle), ("empty", empty)]))
    p.grad, empty.grad = torch.ones(2, 3), torch.ones(0, 3)
    optimizer.step()
    assert idle not in optimizer.state
    assert torch.equal(idle, torch.ones(2, 3))
    assert not torch.equal(p, torch.ones(2, 3))
