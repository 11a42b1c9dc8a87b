"""The loop that a careful engineer writes around the launcher's own model: ours must have its losses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from launcher.data.open import open_data
from launcher.data.shuffle import batch_indices
from launcher.job.schema.job import Job
from launcher.job.schema.optim import AdamW
from launcher.models.build import build_model
from launcher.objective.losses import cross_entropy
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.trace.model_facts import dtype_of
from launcher.plan.plan import Plan


def by_hand(job: Job, plan: Plan, device: torch.device, start: dict[str, Tensor]) -> Callable[[], float]:
    """One optimizer step of it, which returns its loss.

    Weights, their gradients and the optimizer's state in fp32; a copy of the weights that computes, made once
    a step; gradients of each micro batch added up in fp32; fused AdamW.
    """
    # weights as they are kept, and a model of copies that computes: filled at the start of each step
    low = dtype_of(plan.dtypes.compute)
    kept = {n: t.to(device).requires_grad_() for n, t in start.items()}
    with default_dtype(low), device:
        model = build_model(job.model).train()
    found = dict(model.named_parameters())
    assert found.keys() == kept.keys()
    used = {n: found[n] for n in kept}

    # what a step takes besides
    optimizer = _optimizer(job, kept)
    source = open_data(job.data, seed=job.seed).train
    size, micros, clip = job.train.batch_size, plan.sizes.micros, job.train.clip_norm
    numbers = count()

    def one() -> float:
        indices = batch_indices(job.seed, next(numbers), size, len(source))
        xs, y = source.inputs(indices)[0].to(device), source.targets(indices).to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_([*used.values()], [*kept.values()])

        # forward and backward of each micro batch
        total = torch.zeros((), device=device, dtype=torch.float64)
        for x, target in zip(xs.chunk(micros), y.chunk(micros), strict=True):
            loss = cross_entropy(model(x), target, reduction="sum") / y.numel()
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
