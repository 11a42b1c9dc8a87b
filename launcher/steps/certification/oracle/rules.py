"""Independent implementations of what layouts must preserve: sample order, learning rate, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Container
from fnmatch import fnmatchcase
from functools import lru_cache
from math import cos, pi, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher.job.schema.components import Optim, Schedule, Target
from launcher.job.schema.optimizers import SGD, Adafactor, AdamW, Lion, Momentum, Muon
from launcher.job.schema.schedules import WSD, Constant, CosineRestarts, Linear, NamedSchedule, Polynomial
from launcher.job.targets import build
from launcher.steps.certification.oracle.orthogonal_steps import OrthogonalSteps

Indices = npt.NDArray[np.int64]


def order(seed: int, step: int, batch: int, n: int) -> Indices:
    """Indices, out of ``n`` samples, of optimizer step ``step`` (from 0).

    Epochs follow each other without a gap. An epoch is the samples sorted by the raw output of a Philox
    generator whose seed sequence is that of ``seed``, spawned by the number of the epoch.
    """
    places = range(step * batch, (step + 1) * batch)
    return np.array([_epoch(seed, place // n, n)[place % n] for place in places], dtype=np.int64)


def asked(reading: str, seed: int, step: int, batch: int, n: int) -> Indices:
    """The indices passed to a data set: in epochs, sample ``i`` of epoch ``e`` is ``e * n + i``."""
    places = [*range(step * batch, (step + 1) * batch)]
    if reading == "in order":
        return np.array(places, dtype=np.int64)
    again = [place // n * n for place in places] if reading == "in epochs" else 0
    return order(seed, step, batch, n) + np.array(again, dtype=np.int64)


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, n: int) -> Indices:
    stream = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.lexsort((np.arange(n), stream.random_raw(n))).astype(np.int64)


def shares(schedule: Schedule, total: int, allow: tuple[str, ...]) -> Callable[[int], float]:
    """Factors of the learning rate by step (from 0), out of ``total``; a user's class supplies its own."""
    if not isinstance(schedule, Target):
        return lambda step: share(schedule, step, total)
    made: Callable[[int], float] = build(schedule, allow, Callable, key="schedule._target_")  # type: ignore[arg-type]
    return lambda step: float(made(step))


def share(schedule: NamedSchedule, step: int, total: int) -> float:
    """The factor of the learning rate in optimizer step ``step`` (from 0) of ``total``.

    It rises in equal steps to 1 during warmup, which ends at 1. Then it goes from 1 to ``final``, which the
    last step has, or would have if it were not the first of the next period.
    """
    if step + 1 <= schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if isinstance(schedule, Constant):
        return 1.0
    if isinstance(schedule, WSD):
        height = _plateau(schedule, step, total)
    elif isinstance(schedule, CosineRestarts):
        height = _teeth(schedule, step - schedule.warmup_steps)
    else:
        way = min(1.0, (step - schedule.warmup_steps) / max(1, total - schedule.warmup_steps - 1))
        height = 1 - way if isinstance(schedule, Linear | Polynomial) else 0.5 + 0.5 * cos(pi * way)
        height = height**schedule.power if isinstance(schedule, Polynomial) else height
    return schedule.final + (1 - schedule.final) * height


def _plateau(schedule: WSD, step: int, total: int) -> float:
    """1 until the last steps, in which it falls to 0; these are at most the steps after warmup."""
    asked = schedule.decay_steps
    falling = round(total * schedule.decay_share) if asked is None else asked
    falling = min(falling, total - schedule.warmup_steps)
    to_come = max(0, total - 1 - step)
    if to_come >= falling:
        return 1.0
    way = (falling - to_come) / falling
    return 1 - way if schedule.decay_shape == "linear" else 1 - sqrt(way)


def _teeth(schedule: CosineRestarts, step: int) -> float:
    """Half a cosine from each restart to the next; ``step`` counts from the end of the warmup."""
    start, length = 0, schedule.period_steps
    while start + length <= step:
        start, length = start + length, length * schedule.period_multiplier
    return 0.5 + 0.5 * cos(pi * ((step - start) / length))


Named = list[tuple[tuple[str, ...], nn.Parameter]]
"""Each tensor with all of its names."""


def optimizer(
    settings: Optim,
    params: Named,
    allow: tuple[str, ...],
    apart: Container[nn.Parameter] = (),
    low: bool = False,
) -> torch.optim.Optimizer:
    """torch's own class, one of those below, or the user's.

    Weights decay; gains, biases and other vectors do not, unless ``groups`` says otherwise. Each tensor is a
    group of its own. ``apart``: matrices that AdamW updates when Muon updates the others; ``low``: whether
    forwards run in half precision.
    """
    if isinstance(settings, Target):
        plain = [p for _, p in params]
        return build(settings, allow, torch.optim.Optimizer, plain, key="optim._target_")
    groups = [{"params": [p], **_of_its_own(settings, names, p, apart)} for names, p in params]
    if isinstance(settings, Muon):
        return OrthogonalSteps(groups, settings, low)
    if isinstance(settings, Adafactor):
        more = {k: getattr(settings, k) for k in ("lr", "beta2_decay", "eps")}
        return torch.optim.Adafactor(groups, **more, foreach=False)
    if isinstance(settings, AdamW):
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    if isinstance(settings, Lion):
        return SignOfMean(groups, {"lr": settings.lr, "betas": settings.betas})
    nesterov = isinstance(settings, SGD) and settings.nesterov
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=nesterov)


def _of_its_own(
    settings: AdamW | SGD | Momentum | Lion | Adafactor | Muon,
    names: tuple[str, ...],
    p: nn.Parameter,
    apart: Container[nn.Parameter],
) -> dict[str, Any]:
    """The settings of ``p`` from the best key that matches one of its names, or a prefix of one.

    Keys without wildcards precede those with, then keys with more dots, then later ones.
    """
    own: dict[str, Any] = {"weight_decay": settings.weight_decay if p.dim() > 1 else 0.0}
    best = (False, -1, -1)
    said: dict[str, Any] = {}
    for at, (key, group) in enumerate(settings.groups.items()):
        rank = (not set(key) & set("*?["), key.count("."), at)
        if rank > best and any(_fits(key, name) for name in names):
            best, said = rank, {k: v for k, v in group if v is not None}
    if isinstance(settings, Adafactor):
        own["d"] = settings.d
    if isinstance(settings, Muon):
        muon = p.dim() == 2 and said.pop("use", "adamw" if p in apart else "muon") == "muon"
        given = settings if muon else settings.adamw
        own = {k: getattr(given, k) for k in (("momentum",) if muon else ("betas", "eps"))}
        own |= {"lr": given.lr, "weight_decay": given.weight_decay if p.dim() > 1 else 0.0}
        said = {k: v for k, v in said.items() if k in own}
    return own | said


def _fits(key: str, name: str) -> bool:
    while name:
        if name == key or fnmatchcase(name, key):
            return True
        name = name.rpartition(".")[0]
    return False


class SignOfMean(torch.optim.Optimizer):
    """Lion from its paper: algorithm 2 of arXiv 2302.06675."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), eta, decay = group["betas"], group["lr"], group["weight_decay"]
            for theta in group["params"]:
                if theta.grad is None:
                    continue
                g = torch.view_as_real(theta.grad) if theta.is_complex() else theta.grad
                m = self.state[theta].get("m", torch.zeros_like(g))
                c = torch.sign(beta1 * m + (1 - beta1) * g)
                if theta.is_complex():
                    c = torch.view_as_complex(c)
                theta.copy_(theta - eta * (c + decay * theta))
                self.state[theta]["m"] = beta2 * m + (1 - beta2) * g
