"""Muon and its AdamW, implemented from their papers on full tensors, one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from launcher.job.schema.optimizers import Muon


def apart(model: nn.Module) -> frozenset[nn.Parameter]:
    """Matrices that AdamW updates: embedding tables, and the head.

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
    """Groups with ``betas`` use AdamW. ``low``: whether the iteration runs in bfloat16, as in torch."""

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
        """Computes means with torch's arithmetic: bfloat16 would show a different rounding."""
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
