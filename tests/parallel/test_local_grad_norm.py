"""Local norms are those of one process that has only the rank's own samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from launcher.job.schema.job import Job
from launcher.objective.losses import cross_entropy
from launcher.parallel.grad_norm import OwnGradients, watch
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training.metrics_file import LocalNormLog, read
from launcher.steps.model.build_session import build as session
from tests.parity import batch, build, job, plain, step
from tests.ranks import DRAWN, on_ranks

HSDP = {"shard_size": 2, "threshold": 0}
MICROS = 2


def rank_norms(world: World, j: Job, plan: Plan) -> list[dict[str, float]]:
    """Two steps on the same samples: gradients of one step must not be counted in the next."""
    par, pipe = build(world, j, plan)
    own = watch(par)
    pipe.before_reduce = own.see_unsharded
    out = []
    for _ in range(2):
        for _, p in par.trainable():
            p.grad = None
        step(j, par, pipe)
        out.append(own.take(plan.sizes.replicas if plan.gradients_mean else 1))
    return out


def alone(j: Job, plan: Plan, part: int, together: bool) -> dict[str, float]:
    """Norms of the gradient of one part of the batch. The head is untied, because each stage has its own gradient.
    Unless ``together``, the squares of the micro batches are added up."""
    model: Any = plain(j, plan)
    if j.model.tied:  # type: ignore[union-attr]
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    n = plan.sizes.local_batch
    (x,), y = batch(j, plan)
    squares: dict[str, torch.Tensor] = {}
    for i, (a, b) in enumerate(
        zip(x[part * n : (part + 1) * n].chunk(MICROS), y[part * n : (part + 1) * n].chunk(MICROS), strict=True)
    ):
        (cross_entropy(model(a), b) / MICROS).backward()
        if not together or i == MICROS - 1:
            for name, p in model.named_parameters():
                assert p.grad is not None
                squares[name] = squares.get(name, torch.zeros((), dtype=torch.float64)) + p.grad.square().sum()
                p.grad = None
    return {name: s.sqrt().item() for name, s in squares.items()}


LAYOUTS: dict[str, tuple[dict[str, Any], bool]] = {
    "2 replicas": ({"grid": {"dp_replicate": 2}}, True),
    "2 replicas, summed": ({"grid": {"dp_replicate": 2}, "gradients_mean": False}, True),
    "2 stages": ({"pipeline": {"stages": 2}}, True),
    "level1": ({"hsdp": HSDP}, True),
    "level2": ({"hsdp": HSDP | {"optimizer_level": "level2"}}, False),
    "level3": ({"hsdp": HSDP | {"optimizer_level": "level3"}}, False),
    "some whole": ({"hsdp": HSDP | {"threshold": 1}}, True),
    "2 stages x level1": ({"pipeline": {"stages": 2}, "hsdp": HSDP}, True),
    "2 x 2 level1": ({"hsdp": HSDP, "grid": {"dp_replicate": 2}}, True),
}  # fmt: skip


@pytest.mark.parametrize(("parallel", "together"), list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_each_rank_sees_the_gradient_of_its_own_samples(parallel: dict[str, Any], together: bool) -> None:
    pipeline = {"micro_batch_num": MICROS} | parallel.get("pipeline", {})
    j = job(parallel=parallel | {"pipeline": pipeline})
    plan = plan_job(j)
    untied = {"embed.weight": "head.weight"}
    for rank, (first, second) in enumerate(on_ranks(plan.sizes.grid.size, rank_norms, j, plan)):
        assert first == second
        at = plan.sizes.grid.coords(rank)
        want = alone(j, plan, at["dp_replicate"] * plan.sizes.grid["dp_shard"] + at["dp_shard"], together)
        if plan.sizes.grid["pp"] == 1:  # both ends are on one stage: one tensor, one gradient
            first.pop("embed.weight")
            assert first.keys() == want.keys() - {"embed.weight", "head.weight"}
        for name, norm in first.items():
            there = untied.get(name, name) if at["pp"] else name
            assert norm == pytest.approx(want[there], rel=1e-12), (rank, name)


OPERATORS = {"layers.*.mlp.up": {"weight": ["tp", None], "output": [None, None, None]}}


@pytest.mark.parametrize("more", [{}, {"hsdp": HSDP}], ids=["tp2", "tp2 x level1"])
def test_of_an_operator_over_tp_each_rank_sees_its_piece(more: dict[str, Any]) -> None:
    j = job(parallel={"operators": OPERATORS, "grid": {"tp": 2}, "pipeline": {"micro_batch_num": MICROS}} | more)
    plan = plan_job(j)
    ranks = [first for first, _ in on_ranks(plan.sizes.grid.size, rank_norms, j, plan)]
    name = "layers.0.mlp.up.weight"
    for rank in range(0, len(ranks), 2):  # tp is the innermost axis
        want = alone(j, plan, plan.sizes.grid.coords(rank)["dp_shard"], together=True)
        both = [r[name] for r in ranks[rank : rank + 2]]
        assert math.hypot(*both) == pytest.approx(want[name], rel=1e-12)
        assert max(both) < want[name]


def test_the_norm_of_a_million_fp32_gradients_is_that_of_their_exact_sum() -> None:
    g = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0)) ** 3
    own = OwnGradients(model=None)  # type: ignore[arg-type]
    own.see(["w"], [g])
    own.see(["w"], [g])  # a second micro batch at level2
    want = 2 * g.double().square().sum().item()
    assert own.squares["w"].item() == pytest.approx(want, rel=1e-12)


def rank_off(world: World, j: Job, plan: Plan, folder: Any) -> tuple[bool, int]:
    live = session(world, j, plan, folder, drawn=DRAWN)
    seen = sum(order.see is not None for order in live.model.orders)
    return live.local_norm is None and live.pipeline.before_reduce is None, seen


def test_nothing_looks_at_a_gradient_when_it_is_off(tmp_path: Any) -> None:
    j = job(parallel={"hsdp": HSDP})
    assert on_ranks(2, rank_off, j, plan_job(j), tmp_path) == [(True, 0)] * 2


def rank_tells(world: World, folder: Any, device: bool) -> list[str]:
    class Fixed:
        def take(self, scale: float) -> dict[str, float]:
            return {"a": 3.0 * scale, "b": 4.0 * scale} if world.rank == 0 else {"b": float("nan")}

    said: list[str] = []
    norms = LocalNormLog(Fixed(), world, lambda news: said.append(news["text"]), True, folder, device, 2.0)  # type: ignore[arg-type]
    norms.tell(1, loud=True)
    norms.tell(2, loud=False)
    norms.tell(3, loud=True)
    return said


def test_a_line_a_parameter_and_a_row_a_step(tmp_path: Any) -> None:
    said, nothing = on_ranks(2, rank_tells, tmp_path, False)
    assert nothing == []
    assert said == [
        f"local_norm, step {n}: a 6 on rank 0\nlocal_norm, step {n}: b 8 on rank 0, nan on rank 1" for n in (1, 3)
    ]
    assert read(tmp_path / "rank0.jsonl") == [{"step": n, "norms": {"a": 6.0, "b": 8.0}} for n in (1, 3)]
    assert read(tmp_path / "rank1.jsonl") == [{"step": n, "norms": {"b": None}} for n in (1, 3)]


def test_one_number_a_device(tmp_path: Any) -> None:
    said, _ = on_ranks(2, rank_tells, tmp_path, True)
    assert said == [f"local_norm, step {n}: 10 on rank 0, nan on rank 1" for n in (1, 3)]
    assert read(tmp_path / "rank0.jsonl") == [{"step": n, "norm": 10.0} for n in (1, 3)]
