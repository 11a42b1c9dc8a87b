"""Lion (Chen et al. 2023, arXiv 2302.06675): updates of one size, by the sign of a running mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """An elementwise optimizer that keeps one tensor per parameter, ``exp_avg``.

    The first of ``betas`` weighs the mean in the value whose sign is taken, the second in the new mean.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update one parameter after the other, so that temporaries are of the size of one."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                tensors: Iterable[Tensor] = (p, p.grad, state["exp_avg"])
                if p.is_complex():  # real and imaginary part each have a sign
                    tensors = map(torch.view_as_real, tensors)
                update(*tensors, lr=group["lr"], betas=group["betas"], weight_decay=group["weight_decay"])


def update(
    p: Tensor, grad: Tensor, mean: Tensor, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> None:
    """Update ``p`` and ``mean`` in place.

    Products are rounded before they are added, because the sign would show the difference of a fused one.
    """
    now, kept = betas
    sign = mean.mul(now).add_(grad.mul(1 - now)).sign_()
    p.mul_(1 - lr * weight_decay).add_(sign, alpha=-lr)
    mean.mul_(kept).add_(grad.mul(1 - kept))
