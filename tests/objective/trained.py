"""Steps of a job with a user's loss, on ranks and in one process: losses, norms, every gradient and weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import loop
from launcher.steps.certification.compare import Piece, error, pieces
from launcher.steps.model import build_session
from tests.parity import whole
from tests.ranks import DRAWN, on_ranks

K = TypeVar("K")
STEPS, LR, CLIP = 3, 0.5, 1.0


@dataclass
class Trained:
    """Gradients are those after clipping; ``held_out`` has the results of an evaluation after the last step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rank:
    steps: list[tuple[float, float, list[Piece]]]
    weights: list[Piece]
    held_out: dict[str, float]


def on_layouts(jobs: Mapping[K, Job], folder: Path) -> dict[K, tuple[Plan, Trained]]:
    """Run each job in its own layout; all jobs take the same number of ranks."""
    cells = {key: (j, plan_job(j)) for key, j in jobs.items()}
    (size,) = {plan.sizes.grid.size for _, plan in cells.values()}
    ranks = on_ranks(size, _train, cells, folder)
    out = {}
    for key, (_, plan) in cells.items():
        mine = [r[key] for r in ranks]
        made = Trained(held_out=mine[0].held_out, weights=_whole(plan, [p for r in mine for p in r.weights]))
        for steps in zip(*(r.steps for r in mine), strict=True):
            made.losses.append(steps[0][0])
            made.norms.append(steps[0][1])
            made.grads.append(_whole(plan, [p for _, _, held in steps for p in held]))
        out[key] = plan, made
    return out


def _train(world: World, cells: Mapping[K, tuple[Job, Plan]], folder: Path) -> dict[K, _Rank]:
    out = {}
    for key, (j, plan) in cells.items():
        s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
        steps = []
        for step in range(STEPS):
            steps.append((*loop.step(s, CLIP, measuring=step == STEPS - 1), pieces(s.model)))
            s.step = step + 1
        loop.validate(s, None)
        held_out = {k: v for k, v in s.results.items() if k != "val_step"}
        out[key] = _Rank(steps, pieces(s.model, weights=True), held_out)
    return out


def _whole(plan: Plan, found: list[Piece]) -> dict[str, Tensor]:
    buffers = {p.name for p in plan.params if p.buffer}
    return {name: t for name, t in whole(plan, found).items() if name not in buffers}


def alone(model: nn.Module, loss_of: Callable[[], Tensor]) -> Trained:
    """Train with plain torch; ``loss_of`` returns the loss of the full batch."""
    made = Trained()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        made.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        made.losses.append(loss.item())
        made.grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    made.weights = {n: p.detach() for n, p in model.named_parameters()}
    return made


def assert_same(got: Trained, want: Trained, tolerance: float = 1e-12) -> None:
    """Errors are relative to the largest number of each tensor; without a gradient, zeros are accepted."""
    assert got.losses == pytest.approx(want.losses, rel=tolerance)
    assert got.norms == pytest.approx(want.norms, rel=tolerance)
    assert got.held_out == pytest.approx(want.held_out, rel=tolerance)
    for mine, theirs in zip([*got.grads, got.weights], [*want.grads, want.weights], strict=True):
        assert not theirs.keys() - mine.keys(), sorted(theirs.keys() - mine.keys())
        off = {n: error(t, theirs.get(n, torch.zeros_like(t))) for n, t in mine.items()}
        assert {n: e for n, e in off.items() if not e <= tolerance} == {}
