"""The truth: plain torch in one process, which imports nothing of the project.

Data parallelism is what ``DistributedDataParallel`` makes of it: as many models as replicas, each over its own part of
the batch, gradients added up, the first one's buffers handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Read = Callable[[list[int]], tuple[tuple[Tensor, ...], Tensor]]
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Terms:
    """Of one training. ``optim``: ``sgd`` with momentum, or ``adamw``."""

    replicas: int
    micros: int
    batch: int
    steps: int
    samples: int
    optim: str
    clip: float
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """``norm`` is the one before clipping, ``grads`` are those after it."""

    loss: float
    norm: float
    grads: Named
    buffers: Named


@dataclass(frozen=True)
class Trained:
    """``built``: the weights and buffers of a plain build from the seed in training, before anything was loaded."""

    steps: list[Step]
    weights: Named
    built: Named


def train(build: Callable[[], nn.Module], start: Mapping[str, Tensor], read: Read, terms: Terms) -> Trained:
    """From ``start`` (any names of any tensors), in fp64."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(terms.seed)
    models = [build() for _ in range(terms.replicas)]
    for model in models:
        model.train()  # as every loop begins; it may change weights
    built = _kept({**dict(models[0].named_parameters()), **dict(models[0].named_buffers())})
    for model in models:
        _load(model, start)
    optimizers = [_optimizer(m, terms.optim) for m in models]
    order = _order(terms)
    steps = []
    for n in range(terms.steps):
        indices = order[n * terms.batch : (n + 1) * terms.batch]
        steps.append(_step(models, optimizers, *read(indices), terms))
    return Trained(steps, _kept(dict(models[0].named_parameters())), built)


def _step(
    models: list[nn.Module], optimizers: list[torch.optim.Optimizer], xs: tuple[Tensor, ...], y: Tensor, terms: Terms
) -> Step:
    counted = int((y != -100).sum())
    total = 0.0
    for model, optimizer, *mine in zip(models, optimizers, *(t.chunk(len(models)) for t in (*xs, y)), strict=True):
        optimizer.zero_grad(set_to_none=True)
        for *x, t in zip(*(part.chunk(terms.micros) for part in mine), strict=True):
            out = model(*x)
            loss = F.cross_entropy(out.flatten(0, -2), t.flatten(), ignore_index=-100, reduction="sum") / counted
            loss.backward()
            total += loss.item()
    _add_up(models)
    for model in models:
        norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], terms.clip)
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.step()
        _load(model, dict(models[0].named_buffers()))
    grads = {n: p.grad for n, p in models[0].named_parameters() if p.grad is not None}
    return Step(total, float(norm), _kept(grads), _kept(dict(models[0].named_buffers())))


@torch.no_grad()
def _add_up(models: list[nn.Module]) -> None:
    """All models get the sum of their gradients; those of a sparse embedding as dense ones."""
    for same in zip(*(m.parameters() for m in models), strict=True):
        grads = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in same if p.grad is not None]
        if grads:
            whole = torch.stack(grads).sum(0)
            for p in same:
                p.grad = whole.clone()


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Tensors of two or more dims decay, gains and biases do not: the rule that the README states."""
    mine = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in mine if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in mine if p.ndim < 2], "weight_decay": 0.0},
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def _order(terms: Terms) -> list[int]:
    """The documented order of samples in the first epoch: sorted by the raw output of Philox."""
    keys = np.random.Philox(np.random.SeedSequence(terms.seed, spawn_key=(0,))).random_raw(terms.samples)
    return [int(i) for i in np.argsort(keys, kind="stable")]


@torch.no_grad()
def _load(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    mine = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, t in tensors.items():
        if name in mine and mine[name] is not t:
            mine[name].copy_(t)


def _kept(tensors: Mapping[str, Tensor]) -> Named:
    return {n: t.detach().clone() for n, t in tensors.items()}


def unlike(start: Mapping[str, Tensor], built: Mapping[str, Tensor]) -> list[str]:
    """Tensors whose numbers at the start are not of the same kind as those of a plain build.

    Constants must be equal; of more than 16 random numbers mean and deviation agree to six standard errors.
    """
    out = []
    for name, a in start.items():
        b = built.get(name)
        if b is None or not b.numel() or not b.is_floating_point():
            continue
        spread, n = b.std(unbiased=False).item(), b.numel()
        if not bool(a.isfinite().all()) and bool(b.isfinite().all()):
            out.append(f"{name} is not finite")
        elif n > 1 and spread < 1e-12:
            if not torch.allclose(a, b):
                out.append(f"{name} is not {b.flatten()[0]:g} everywhere")
        elif n > 16:
            mean = abs(a.mean() - b.mean()).item() / (spread * (2 / n) ** 0.5)
            ratio = abs(float((a.std(unbiased=False) / spread).log())) * n**0.5
            if mean > 6 or ratio > 6:
                out.append(f"{name} has std {a.std():.2g}, not {spread:.2g}")
    return out
