"""The same training in one process: the plain model, with nothing of ours but its numbers at step 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from launcher.data.open import open_data
from launcher.data.order import batch_indices
from launcher.decide import builder
from launcher.job.schema import Job
from launcher.models.loss import cross_entropy
from launcher.optim.build import build_optimizer
from launcher.parallel import init
from launcher.parallel.read import default_dtype, dtype_of
from launcher.plan.facts import COMPUTE, DTYPE
from launcher.plan.plan import Plan

Samples = tuple[tuple[Tensor, ...], Tensor]
"""Inputs and targets."""


@dataclass(frozen=True)
class Outcome:
    """Mean loss of the global batch, gradients and buffers by first name, and the global norm before clipping.

    A parameter without a gradient is not in ``grads``; one behind an unused output may have zeros for it, for all that
    crosses a stage boundary gets a gradient.
    """

    loss: float
    norm: float
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@torch.no_grad()
def plain(job: Job, plan: Plan) -> nn.Module:
    """The model as its author wrote it, on the CPU."""
    with default_dtype(dtype_of(DTYPE[plan.precision])):
        _, numbers = init.record(builder(job), plan)
        model = builder(job)()
    first = {n: p.name for p in plan.params for n in p.names}
    for name, t in init.tensors(model).items():
        t.copy_(numbers(first.get(name, name)))
    return model


def accumulate(
    model: Callable[..., Tensor], xs: tuple[Tensor, ...], y: Tensor, parts: int, scale: float = 1.0
) -> float:
    """Mean loss of the batch, and ``scale`` times its gradients, in ``parts`` equal micro batches one by one."""
    total = 0.0
    for *x, t in zip(*(v.chunk(parts) for v in (*xs, y)), strict=True):
        loss = cross_entropy(model(*x), t) / parts
        (loss * scale).backward()
        total += loss.item()
    return total


def computing(model: nn.Module, plan: Plan) -> Callable[..., Tensor]:
    """``model``, or in half precision what it makes of weights that are cast anew for every micro batch."""
    return partial(_low, model, {p.name: dtype_of(p.compute) for p in plan.params}) if plan.dtypes.mixed else model


def _low(model: nn.Module, dtypes: Mapping[str, torch.dtype], *xs: Any) -> Any:
    return functional_call(model, {n: p.to(dtypes[n]) for n, p in model.named_parameters()}, xs)


class Reference:
    """One process that trains ``job``, a step at a time."""

    def __init__(self, job: Job, plan: Plan, device: torch.device) -> None:
        self.plan, self.device, self._job = plan, device, job
        self.model = plain(job, plan).to(device)
        named = [(n, t) for n, t in self.model.named_parameters() if t.requires_grad]
        self.optimizer = build_optimizer(job.optim, named, job.security.allow)
        self._source = open_data(job.data, seed=job.seed, allow=job.security.allow).train

    def batch(self, step: int) -> Samples:
        """All samples of an optimizer step, in order."""
        indices = batch_indices(self._job.seed, step, self.plan.sizes.global_batch, len(self._source))
        dtype = dtype_of(COMPUTE[self.plan.precision])
        *xs, y = (
            t.to(self.device, dtype if t.is_floating_point() else t.dtype)
            for t in (*self._source.inputs(indices), self._source.targets(indices))
        )
        return tuple(xs), y

    def backward(self, step: int, clip: float | None, scale: float) -> Outcome:
        """Loss and gradients of a step, clipped as torch does it; backward works on ``scale`` times the loss.

        The norm is added up in fp64: what ``clip_grad_norm_`` finds of a million numbers in fp32 has five right digits.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate(*self.batch(step), scale)
        mine = init.tensors(self.model)
        grads = {p.name: g for p in self.plan.params if p.trainable and (g := mine[p.name].grad) is not None}
        for g in grads.values():
            g.mul_(self._summed() / scale)
        square = sum((g.double().square().sum() for g in grads.values()), torch.zeros((), dtype=torch.float64))
        if clip is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, square.sqrt())
        return Outcome(loss, square.sqrt().item(), _kept(grads), _kept(self._buffers()))

    def update(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights after an optimizer step with these gradients, which may differ from its own by a rounding.

        An optimizer that divides by a gradient's size blows a rounding up: given the same gradients, two are equal.
        """
        mine = init.tensors(self.model)
        for p in self.plan.params:
            if p.trainable:
                mine[p.name].grad = grads[p.name].to(self.device) if p.name in grads else None
        self.optimizer.step()
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        mine = init.tensors(self.model)
        return _kept({p.name: mine[p.name] for p in self.plan.params if not p.buffer})

    def _accumulate(self, xs: tuple[Tensor, ...], y: Tensor, scale: float) -> float:
        """Micro batches one by one, as a rank sees them: a forward may change something, a hook may look at a gradient.

        Every data-parallel rank begins with what the step began with; what the first one has changed is kept.
        """
        sizes, model = self.plan.sizes, computing(self.model, self.plan)
        loss, n = 0.0, sizes.replicas
        before, after = _kept(self._state()) if n > 1 else {}, dict[str, Tensor]()
        for rank, *part in zip(range(n), *(t.chunk(n) for t in (*xs, y)), strict=True):
            self._restore(before if rank else {})
            loss += accumulate(model, tuple(part[:-1]), part[-1], sizes.micros, scale / n) / n
            after = after or (_kept(self._state()) if n > 1 else {})
        self._restore(after)
        return loss

    def _state(self) -> dict[str, Tensor]:
        return init.tensors(self.model)

    @torch.no_grad()
    def _restore(self, kept: Mapping[str, Tensor]) -> None:
        mine = self._state()
        for name, t in kept.items():
            mine[name].copy_(t)

    def _buffers(self) -> dict[str, Tensor]:
        mine = init.tensors(self.model)
        return {p.name: mine[p.name] for p in self.plan.params if p.buffer}

    def _summed(self) -> int:
        """How often ``loss_reduction: sum`` and ``gradients_mean: false`` count the mean."""
        sizes = self.plan.sizes
        micros = sizes.micros if self.plan.loss_reduction == "sum" else 1
        return micros * (1 if self.plan.gradients_mean else sizes.replicas)


def _kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
