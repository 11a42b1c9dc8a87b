"""The same training in one process: the plain model, with only its weights at step 0 from our code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from launcher.job.schema.job import Job
from launcher.objective.losses import cross_entropy
from launcher.parallel.deferred_init import fill
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.plan import Plan
from launcher.plan.values.class_dims import IGNORED
from launcher.plan.values.precision import DTYPE
from launcher.planner.plan_job import builder


@dataclass(frozen=True)
class Outcome:
    """Mean loss of the global batch, gradients and buffers by first name, and the global norm before clipping.

    A parameter without a gradient is not in ``grads``: with zeros an optimizer would decay it.
    """

    loss: float
    norm: float
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@torch.no_grad()
def plain(job: Job, plan: Plan) -> nn.Module:
    """The model as its author wrote it, on the CPU."""
    with default_dtype(dtype_of(DTYPE[plan.precision])):
        model = builder(job)()
        model.train()  # as at the start of a user's loop
        _, numbers = fill.from_constructor(builder(job), plan)
    first = {n: p.name for p in plan.params for n in p.names}
    for name, t in fill.tensors(model).items():
        t.copy_(numbers(first.get(name, name)))
    return model


def accumulate(model: Callable[..., Tensor], xs: tuple[Tensor, ...], y: Tensor, parts: int) -> float:
    """The mean loss of the batch, and its gradients, in ``parts`` equal micro batches, one after another."""
    counted = int((y != IGNORED).sum())
    total = 0.0
    for *x, t in zip(*(v.chunk(parts) for v in (*xs, y)), strict=True):
        loss = cross_entropy(model(*x), t, reduction="sum") / counted
        loss.backward()
        total += loss.item()
    return total
