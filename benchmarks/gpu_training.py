"""Steps of the launcher and of a hand-written loop on one device, in turn: equal weights, equal batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from launcher.data.open import open_data
from launcher.data.shuffle import batch_indices
from launcher.job.schema.job import Job
from launcher.job.schema.optimizers import AdamW
from launcher.models.build import build_model
from launcher.objective.cross_entropy import cross_entropy
from launcher.optim.build import scale_lr
from launcher.parallel.cost.memory_meter import MemoryMeter
from launcher.parallel.local import local
from launcher.parallel.trace.model_facts import default_dtype, dtype_of
from launcher.plan.plan import Plan
from launcher.runtime.cluster.world import World
from launcher.runtime.training.loop import step
from launcher.runtime.training.session import Session
from launcher.steps.model import build_session

Step = Callable[[], float]
"""One optimizer step; returns its loss, so that the CPU waits for it."""

KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""What selective recomputation keeps: results of products and of attention."""


@dataclass(frozen=True)
class Measured:
    """Seconds a step of every block, and the loss of each step, ours and by hand.

    ``first``: seconds of our first step. ``peak``: bytes of tensors at the fullest moment of our second;
    ``reserved``: those that torch's allocator had taken from the device by then.
    """

    ours: tuple[float, ...]
    by_hand: tuple[float, ...]
    losses: tuple[tuple[float, float], ...]
    first: float
    peak: int
    reserved: int | None


def work(world: World, job: Job, plan: Plan, blocks: int, steps: int) -> Measured:
    """After two steps of each, of which ours are measured in memory while nothing else is there."""
    # ours: the first step compiles, say; the second tells how much memory one takes
    device = torch.device(world.device)
    live = build_session.build(world, job, plan, Path())
    start = {name: local(t.detach()).clone().cpu() for name, t in live.model.trainable()}
    began = time.perf_counter()
    losses = [(_one(live, job), 0.0)]
    first = time.perf_counter() - began
    peak, reserved, loss = _fullest(live, job, device)
    losses.append((loss, 0.0))

    # by hand the same two steps, then both in turn
    theirs = by_hand(job, plan, device, start)
    losses = [(ours, theirs()) for ours, _ in losses]
    times: dict[str, list[float]] = {"ours": [], "by hand": []}
    for _ in range(blocks):
        mine, seconds = _block(partial(_one, live, job), device, steps)
        times["ours"].append(seconds)
        other, seconds = _block(theirs, device, steps)
        times["by hand"].append(seconds)
        losses += zip(mine, other, strict=True)
    return Measured(tuple(times["ours"]), tuple(times["by hand"]), tuple(losses), first, peak, reserved)


def _one(live: Session, job: Job) -> float:
    """As ``runtime.training.loop`` does it."""
    scale_lr(live.optimizer, 1.0)
    loss, _ = step(live, job.train.clip_norm)
    live.step += 1
    return loss


def _block(one: Step, device: torch.device, steps: int) -> tuple[list[float], float]:
    """The loss of each step, and seconds a step."""
    began = time.perf_counter()
    losses = [one() for _ in range(steps)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return losses, (time.perf_counter() - began) / steps


def _fullest(live: Session, job: Job, device: torch.device) -> tuple[int, int | None, float]:
    """Bytes at the fullest moment of a step, those the allocator had taken by then, and its loss."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        loss = _one(live, job)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), loss
    states = [v for state in live.optimizer.state.values() for v in state.values()]
    with MemoryMeter([*(t for _, t in live.model.named()), *states]) as held:
        loss = _one(live, job)
    return held.peak, None, loss


def by_hand(job: Job, plan: Plan, device: torch.device, start: dict[str, Tensor]) -> Step:
    """What a careful engineer writes for exactly this model on one device.

    Weights, their gradients and the optimizer's state in fp32; a copy of the weights that computes, made once
    a step; gradients of each micro batch added up in fp32; fused AdamW.
    """
    # weights as they are kept, and a model of copies that computes: filled at the start of each step
    low = dtype_of(plan.dtypes.compute)
    kept = {n: t.to(device).requires_grad_() for n, t in start.items()}
    with default_dtype(low), torch.device("meta"):
        model: Any = build_model(job.model)
    model.to_empty(device=device)
    found = dict(model.named_parameters())
    assert found.keys() == kept.keys()
    assert not list(model.buffers())
    used = {n: found[n] for n in kept}
    layers = [_layer(job, layer) for layer in model.layers]

    # what a step takes besides
    optimizer = _optimizer(job, kept)
    source = open_data(job.data, seed=job.seed).train
    size, micros, clip = job.train.batch_size, plan.sizes.micros, job.train.clip_norm
    numbers = count()

    def one() -> float:
        indices = batch_indices(job.seed, next(numbers), size, len(source))
        xs, y = _moved(source.inputs(indices)[0], device), _moved(source.targets(indices), device)
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_([*used.values()], [*kept.values()])

        # forward and backward of each micro batch
        total = torch.zeros((), device=device, dtype=torch.float64)
        for x, target in zip(xs.chunk(micros), y.chunk(micros), strict=True):
            h = model.embed(x)
            for layer in layers:
                h = layer(h)
            loss = cross_entropy(model.head(model.norm(h)), target, reduction="sum") / y.numel()
            loss.backward()
            total += loss.detach()
            _collect(kept, used)

        # the CPU waits here, and only here
        grads = [t.grad for t in kept.values()]
        norms = torch.stack(torch._foreach_norm(grads, 2, torch.float64))
        mean, square = torch.stack([total, norms.square().sum()]).tolist()
        if clip is not None and square**0.5 > clip:
            torch._foreach_mul_(grads, clip / (square**0.5 + 1e-6))
        optimizer.step()
        return float(mean)

    return one


def _optimizer(job: Job, kept: dict[str, Tensor]) -> torch.optim.Optimizer:
    """As the job's; vectors do not decay."""
    assert isinstance(job.optim, AdamW)
    decayed = [t for t in kept.values() if t.dim() > 1]
    others = [t for t in kept.values() if t.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=job.optim.lr,
        betas=job.optim.betas,
        eps=job.optim.eps,
        weight_decay=job.optim.weight_decay,
        fused=True,
    )


def _moved(t: Tensor, device: torch.device) -> Tensor:
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


@torch.no_grad()
def _collect(kept: dict[str, Tensor], used: dict[str, Tensor]) -> None:
    """Gradients of one micro batch to where they are added up."""
    new = [t.grad for t in used.values()]
    sums = [t.grad for t in kept.values()]
    if sums[0] is None:
        for t, g in zip(kept.values(), new, strict=True):
            t.grad = g.to(torch.float32, copy=True)
    else:
        torch._foreach_add_(sums, new)
    for t in used.values():
        t.grad = None


def _layer(job: Job, layer: Any) -> Callable[[Tensor], Tensor]:
    """As the settings have it: run again in the backward, compiled, or plain."""
    run: Callable[[Tensor], Tensor] = layer
    again = job.parallel.recompute
    if again is not None:
        more = {"context_fn": _contexts} if again.policy == "selective" else {}
        run = partial(checkpoint, layer, use_reentrant=False, **more)
    compiled = getattr(job.train, "compile", None)
    return run if compiled is None else torch.compile(run, backend=compiled.backend)


def _contexts() -> Any:
    def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if func in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
