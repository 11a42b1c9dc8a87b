"""Lion (Chen et al. 2023, arXiv 2302.06675): steps of one size, by the sign of a running mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Elementwise. Keeps one tensor of each parameter, ``exp_avg``.

    ``betas``: how much of the mean is in what the sign is taken of, and how much of it stays.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One parameter after the other, so that what it needs besides is of the size of one."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                tensors: Iterable[Tensor] = (p, p.grad, state["exp_avg"])
                if p.is_complex():  # two numbers, each with a sign
                    tensors = map(torch.view_as_real, tensors)
                update(*tensors, lr=group["lr"], betas=group["betas"], weight_decay=group["weight_decay"])


def update(
    p: Tensor, grad: Tensor, mean: Tensor, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> None:
    """Products are rounded before they are added: a sign would show a fused one."""
    now, kept = betas
    sign = mean.mul(now).add_(grad.mul(1 - now)).sign_()
    p.mul_(1 - lr * weight_decay).add_(sign, alpha=-lr)
    mean.mul_(kept).add_(grad.mul(1 - kept))
