"""A few optimizer steps on a user's own data, on the ranks of a layout and in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import checkpoint_tensors, loop, save
from launcher.steps.certification.compare import pieces
from launcher.steps.model import build_session
from tests.parity import job, whole
from tests.parity.reference import plain
from tests.ranks import DRAWN, on_ranks

SHARD: dict[str, Any] = {"shard_size": 2, "threshold": 0, "optimizer_level": "level2"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "pp2": {"pipeline": {"stages": 2, "micro_batch_num": 2}},
    "hsdp2": {"hsdp": SHARD},
}
STEPS, BATCH, RATE = 5, 4, 0.1
MODEL = {"_target_": "tests.data.torch_datasets.sets.Net"}


def trained(data: Mapping[str, Any], layout: str = "one rank", model: Any = MODEL, **more: Any) -> Job:
    more = {
        "train__steps": STEPS,
        "train__batch_size": BATCH,
        "optim": {"name": "sgd", "lr": RATE, "momentum": 0.0},
        "security__allow": ("tests",),
    } | more
    return job(model=model, data=dict(data), parallel=LAYOUTS[layout], **more)


def of(name: str, **arguments: Any) -> dict[str, Any]:
    """A target for the class ``name`` of ``sets``."""
    return {"_target_": f"tests.data.torch_datasets.sets.{name}", **arguments}


def rank_steps(world: World, j: Job, plan: Plan, folder: Path, until: int, saved: Path | None) -> Any:
    """Steps up to ``until``: the checkpoint written then, all losses, the held-out loss, and the weights."""
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    if saved is not None:
        checkpoint_tensors.load(s, saved)
    losses = []
    while s.step < until:
        losses.append(loop.step(s, None)[0])
        s.step += 1
    held = loop.validate(s, None) if len(s.feed.val) else None
    return save.save(s, None), losses, held, pieces(s.model, weights=True)


def on_layout(j: Job, folder: Path, until: int = STEPS, saved: Path | None = None) -> Any:
    """The results of ``rank_steps``, with full weights."""
    plan = plan_job(j)
    found = on_ranks(plan.sizes.grid.size, rank_steps, j, plan, folder, until, saved)
    path, losses, held, _ = found[0]
    return path, losses, held, whole(plan, [p for *_, some in found for p in some])


Batch = tuple[tuple[Tensor, ...], Tensor]


def alone(j: Job, batch: Callable[[int], Batch], held: Batch | None = None) -> Any:
    """Plain torch on the batches of all steps: its losses, the held-out loss, and the weights."""
    plan = plan_job(j)
    model = plain(j, plan)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        xs, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(*xs), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        end = None if held is None else F.cross_entropy(model(*held[0]), held[1]).item()
    return losses, end, dict(model.named_parameters())


def order(n: int, seed: int = 0) -> list[list[tuple[int, int]]]:
    """(epoch, sample) of each place of each step, as docs/data.md and the laws define it."""
    out: list[tuple[int, int]] = []
    epoch = 0
    while len(out) < STEPS * BATCH:
        keys = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(n)
        out += [(epoch, int(i)) for i in np.argsort(keys, kind="stable")]
        epoch += 1
    return [out[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]


def assert_same(got: Any, want: Any) -> None:
    """Assert that the losses of the last steps, the held-out loss and every weight are equal, in fp64."""
    _, losses, held, weights = got
    want_losses, want_held, want_weights = want
    torch.testing.assert_close(losses, want_losses[-len(losses) :], rtol=1e-12, atol=1e-14)
    assert (held is None) == (want_held is None)
    if held is not None:
        torch.testing.assert_close(held, want_held, rtol=1e-12, atol=1e-14)
    for name, w in want_weights.items():
        torch.testing.assert_close(weights[name], w.detach(), rtol=1e-12, atol=1e-14)
