"""A second implementation of the optimizers, with which ``certify`` compares."""

from __future__ import annotations

from collections.abc import Container
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from launcher.job.schema.components import Optim
from launcher.job.schema.optim import (
    SGD,
    Adafactor,
    AdamW,
    Lion,
    Momentum,
    Muon,
)
from launcher.job.schema.user_class import Target
from launcher.job.targets import build


def adamw_matrices(model: nn.Module) -> frozenset[nn.Parameter]:
    """Returns the matrices that ``muon`` leaves to AdamW: embedding tables, and the head.

    The head is the last linear module outside of any list or dictionary of modules.
    """
    out: set[nn.Parameter] = set()
    head: nn.Linear | None = None
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            inside.append(f"{name}.")
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            out |= set(module.parameters(recurse=False))
        elif isinstance(module, nn.Linear) and not any(name.startswith(start) for start in inside):
            head = module
    return frozenset(out | set(() if head is None else head.parameters(recurse=False)))


class OrthogonalSteps(torch.optim.Optimizer):
    """Muon; groups with ``betas`` use AdamW. ``low``: the iteration runs in bfloat16, as in torch."""

    def __init__(self, groups: list[dict[str, Any]], settings: Muon, low: bool) -> None:
        super().__init__(groups, {"lr": settings.lr})
        self._settings, self._low = settings, low

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for theta in group["params"]:
                if theta.grad is not None and "betas" in group:
                    self._adamw(theta, theta.grad, group)
                elif theta.grad is not None:
                    self._muon(theta, theta.grad, group)

    def _muon(self, theta: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        """Updates a matrix.

        Means use torch's ``lerp``: other arithmetic would round differently, which shows in bfloat16.
        """
        mu = group["momentum"]
        mean = torch.lerp(self.state[theta].get("mean", torch.zeros_like(g)), g, 1 - mu)
        self.state[theta]["mean"] = mean
        b = torch.lerp(g, mean, mu) if self._settings.nesterov else mean

        rows, columns = theta.shape
        size = max(1.0, rows / columns) ** 0.5
        if self._settings.adjust_lr_fn == "match_rms_adamw":
            size = 0.2 * max(rows, columns) ** 0.5
        o = self._orthogonal(b.to(torch.bfloat16) if self._low else b).to(theta.dtype)
        theta.copy_(theta - group["lr"] * group["weight_decay"] * theta - group["lr"] * size * o)

    def _orthogonal(self, x: Tensor) -> Tensor:
        """Applies an odd polynomial of degree 5 to the singular values, repeatedly."""
        if x.shape[0] > x.shape[1]:
            return self._orthogonal(x.T).T
        a, b, c = self._settings.ns_coefficients
        x = x / max(x.norm().item(), self._settings.eps)
        for _ in range(self._settings.ns_steps):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        return x

    def _adamw(self, theta: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[theta], group["betas"]
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", torch.zeros_like(g)) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", torch.zeros_like(g)) + (1 - beta2) * g * g
        step = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
        theta.copy_(theta - group["lr"] * (step + group["weight_decay"] * theta))


Named = list[tuple[tuple[str, ...], nn.Parameter]]
"""Each tensor with all of its names."""


def optimizer(
    settings: Optim,
    params: Named,
    allow: tuple[str, ...],
    adamw_matrices: Container[nn.Parameter] = (),
    low: bool = False,
) -> torch.optim.Optimizer:
    """Builds the reference optimizer: torch's own, one of this file, or the user's class.

    Weights decay; gains, biases and other vectors do not, unless ``groups`` says otherwise. Each tensor has
    its own group. ``adamw_matrices``: those that AdamW updates when Muon updates the others; ``low``: whether
    forwards run in half precision.
    """
    if isinstance(settings, Target):
        plain = [p for _, p in params]
        return build(settings, allow, torch.optim.Optimizer, plain, key="optim._target_")
    groups = [{"params": [p], **_of_its_own(settings, names, p, adamw_matrices)} for names, p in params]
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
    adamw_matrices: Container[nn.Parameter],
) -> dict[str, Any]:
    """Returns the settings of ``p`` from the best key that matches one of its names, or a prefix of one.

    Keys without wildcards take precedence, then keys with more dots, then later keys.
    """
    own: dict[str, Any] = {"weight_decay": settings.weight_decay if p.dim() > 1 else 0.0}
    best = (False, -1, -1)
    overrides: dict[str, Any] = {}
    for at, (key, group) in enumerate(settings.groups.items()):
        rank = (not set(key) & set("*?["), key.count("."), at)
        if rank > best and any(_fits(key, name) for name in names):
            best, overrides = rank, {k: v for k, v in group if v is not None}
    if isinstance(settings, Adafactor):
        own["d"] = settings.d
    if isinstance(settings, Muon):
        muon = p.dim() == 2 and overrides.pop("use", "adamw" if p in adamw_matrices else "muon") == "muon"
        source = settings if muon else settings.adamw
        own = {k: getattr(source, k) for k in (("momentum",) if muon else ("betas", "eps"))}
        own |= {"lr": source.lr, "weight_decay": source.weight_decay if p.dim() > 1 else 0.0}
        overrides = {k: v for k, v in overrides.items() if k in own}
    return own | overrides


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
