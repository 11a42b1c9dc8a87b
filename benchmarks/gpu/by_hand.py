"""A hand-written loop around the launcher's own model; the launcher must reach the same losses."""

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
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.plan import Plan


def by_hand(job: Job, plan: Plan, device: torch.device, start: dict[str, Tensor]) -> Callable[[], float]:
    """Return a function that runs one optimizer step and returns its loss.

    Weights, gradients and the optimizer's state are in fp32. At the start of each step, the weights are
    copied to a model in the dtype that computes. The gradients of micro batches are added up in fp32. The
    optimizer is the fused AdamW.
    """
    # the weights in fp32, and the model that computes with copies of them
    low = dtype_of(plan.dtypes.compute)
    kept = {n: t.to(device).requires_grad_() for n, t in start.items()}
    with default_dtype(low), device:
        model = build_model(job.model).train()
    found = dict(model.named_parameters())
    assert found.keys() == kept.keys()
    used = {n: found[n] for n in kept}

    # what else a step needs
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
            _accumulate_grads(kept, used)

        # the only place where the CPU waits for the device
        grads = [t.grad for t in kept.values()]
        norms = torch.stack(torch._foreach_norm(grads, 2, torch.float64))
        mean, square = torch.stack([total, norms.square().sum()]).tolist()
        if clip is not None and square**0.5 > clip:
            torch._foreach_mul_(grads, clip / (square**0.5 + 1e-6))
        optimizer.step()
        return float(mean)

    return one


def _optimizer(job: Job, kept: dict[str, Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of the job; vectors have no weight decay."""
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
def _accumulate_grads(kept: dict[str, Tensor], used: dict[str, Tensor]) -> None:
    """Add the gradients of one micro batch to the sums, and clear them."""
    new = [t.grad for t in used.values()]
    sums = [t.grad for t in kept.values()]
    if sums[0] is None:
        for t, g in zip(kept.values(), new, strict=True):
            t.grad = g.to(torch.float32, copy=True)
    else:
        torch._foreach_add_(sums, new)
    for t in used.values():
        t.grad = None
