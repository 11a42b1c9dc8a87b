"""What ranks do in tests on a device: module-level functions, because spawned processes unpickle them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call

from launcher.job.schema.job import Job
from launcher.objective.losses import ClassLoss, cross_entropy
from launcher.parallel import grad_norm, mesh
from launcher.parallel.parallel_model import ParallelModel, parallelize
from launcher.parallel.trace.model_structure import skeleton
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.cut.tensor_placement import full_precision_names
from launcher.plan.plan import Plan
from launcher.planner.plan_job import inputs
from launcher.runtime.cluster.world import World, deterministic
from launcher.runtime.training import checkpoint_tensors, loop, save
from launcher.runtime.training.pipeline import PipelineRuntime
from launcher.runtime.training.session import Session
from launcher.steps.certification.compare import pieces
from launcher.steps.model import build_session
from launcher.steps.model.shared_construction import draw
from tests.parity import Outcome, Step, batch, place, plain


def built(world: World, j: Job, plan: Plan) -> tuple[ParallelModel, PipelineRuntime]:
    """The live model of one rank, on its device."""
    device = torch.device(world.device)
    meshes = mesh.build(plan.sizes.grid, device.type, plan.ties)
    model = parallelize(draw(j, plan), plan, meshes, device)
    return model, PipelineRuntime(model, inputs(j, plan.sizes.micro_batch), ClassLoss(), device)


def one_step(world: World, j: Job, plan: Plan, exact: bool = False) -> Step:
    """One forward and backward: mean loss, norm, and this rank's gradients. ``exact``: with deterministic kernels."""
    if exact:
        deterministic()
    model, pipeline = built(world, j, plan)
    (*xs, y), n = _moved(world, j, plan), plan.sizes.local_batch
    mine = slice(place(plan, model.meshes) * n, (place(plan, model.meshes) + 1) * n)
    share = pipeline.step(tuple(x[mine] for x in xs), y[mine])
    sums = torch.stack(grad_norm.build(model).squared_beside(share))
    torch.distributed.all_reduce(sums)
    return sums[0].item(), sums[1].sqrt().item(), pieces(model)


def by_hand(world: World, j: Job, plan: Plan, parts: int) -> Outcome:
    """The plain model on the same device: weights are cast for each forward, gradients are summed in the kept dtype."""
    device, low = torch.device(world.device), dtype_of(plan.dtypes.compute)
    model = plain(j, plan).to(device)
    kept = full_precision_names(skeleton(model))
    own = dict(model.named_parameters())
    *xs, y = _moved(world, j, plan)
    total = 0.0
    for *x, t in zip(*(v.chunk(parts) for v in (*xs, y)), strict=True):
        cast = {n: p if n in kept else p.to(low) for n, p in own.items()}
        loss = cross_entropy(functional_call(model, cast, tuple(x)), t) / parts
        loss.backward()
        total += loss.item()
    grads = {n: p.grad.cpu() for n, p in own.items() if p.grad is not None}
    square = sum(g.double().square().sum().item() for g in grads.values())
    return Outcome(total, math.sqrt(square), grads, {})


def _moved(world: World, j: Job, plan: Plan) -> list[Tensor]:
    """Inputs and targets of the fixed batch."""
    xs, y = batch(j, plan)
    low = dtype_of(plan.dtypes.compute)
    return [t.to(world.device, low if t.is_floating_point() else t.dtype) for t in (*xs, y)]


def _session(world: World, j: Job, plan: Plan, folder: Path) -> Session:
    return build_session.build(world, j, plan, folder)


def _weights(s: Session) -> dict[str, Tensor]:
    return {n: t.detach().cpu().clone() for n, t in checkpoint_tensors.tensors(s, checkpoint_tensors.states(s)).items()}


def _train(s: Session, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(loop.step(s, 1.0)[0])
        s.step += 1
    return losses


@dataclass(frozen=True)
class Overflow:
    """What dynamic loss scaling did: the scale before each step, and whether the step changed the weights."""

    scales: list[float]
    moved: list[bool]
    losses: list[float]


def overflowing(world: World, j: Job, plan: Plan, folder: Path) -> Overflow:
    """Train from a scale at which every gradient overflows until a step changes the weights."""
    s = _session(world, j, plan, folder)
    s.scaling.factor = 2.0**40
    out = Overflow([], [], [])
    while not any(out.moved):
        before = _weights(s)
        out.scales.append(s.scaling.factor)
        out.losses.extend(_train(s, 1))
        out.moved.append(
            any(not torch.equal(before[n], t) for n, t in _weights(s).items() if not n.startswith("optim"))
        )
    return out


@dataclass(frozen=True)
class Saved:
    """Losses before and after a checkpoint and after resuming from it, and whether host copies were pinned."""

    before: list[float]
    after: list[float]
    again: list[float]
    pinned: set[bool]


def saved_and_loaded(world: World, j: Job, plan: Plan, folder: Path, beside: bool) -> Saved:
    """Three steps, a checkpoint (``beside``: written by a thread), three steps, and those three again after a load."""
    deterministic()
    s = _session(world, j, plan, folder)
    before = _train(s, 3)
    save.save(s, 1, s.saver if beside else None)
    after = _train(s, 3)
    save.finish(s)
    pinned = set() if s.saver is None else {t.is_pinned() for t in s.saver._host.values() if t.dim()}

    other = _session(world, j, plan, folder)
    checkpoint_tensors.load(other, folder / "checkpoints" / "step-000003")
    return Saved(before, after, _train(other, 3), pinned)


def two_saves_of_one_moment(world: World, j: Job, plan: Plan, folder: Path) -> list[str]:
    """The tensors whose saved values differ from those at the time of the save, after which training continued."""
    s = _session(world, j, plan, folder)
    _train(s, 2)
    want = _weights(s)
    save.save(s, 1, s.saver)
    _train(s, 2)
    save.finish(s)
    other = _session(world, j, plan, folder)
    checkpoint_tensors.load(other, folder / "checkpoints" / "step-000002")
    found = _weights(other)
    assert found.keys() == want.keys()
    return [n for n, t in want.items() if not torch.equal(t, found[n])]


def waits_for_the_device(world: World, j: Job, plan: Plan, folder: Path) -> list[str]:
    """Where the CPU waits for the GPU in one step, according to torch; the batch is read before."""
    s = _session(world, j, plan, folder)
    _train(s, 2)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen, _told_of_waits():
        warnings.simplefilter("always")
        _train(s, 1)
    return [f"{w.filename}:{w.lineno}" for w in seen if "called a synchronizing" in str(w.message)]


@contextmanager
def _told_of_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def row_of_a_step(world: World, j: Job, plan: Plan, folder: Path) -> tuple[str, dict[str, float]]:
    """The name of the device, and the figures of a step on it."""
    s = _session(world, j, plan, folder)
    _train(s, 1)
    name = "cpu" if world.device == "cpu" else torch.cuda.get_device_name(world.device)
    return name, s.figures.row(1.0)
