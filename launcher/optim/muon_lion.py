"""Muon and Lion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from launcher.job.schema.optim import Muon as Settings
from launcher.optim.sharded import TensorPieces


class Muon(torch.optim.Optimizer):
    """Updates groups whose ``use`` is muon by Muon, and the others by AdamW.

    Muon keeps one tensor per matrix, ``momentum_buffer``. ``pieces`` says for each parameter which full
    tensor it is a piece of. Every rank gathers each matrix, one after the other, in ``ns_dtype`` of its
    group, and computes the full update.
    """

    def __init__(
        self, params: Iterable[Any], settings: Settings, pieces: Mapping[nn.Parameter, TensorPieces]
    ) -> None:
        super().__init__(params, {"lr": settings.lr})
        self._settings, self._pieces = settings, pieces

        # torch's AdamW, with the same groups and the same state
        others = [group for group in self.param_groups if group.get("use") == "adamw"]
        self._adamw = torch.optim.AdamW(others, fused=True) if others else None
        if self._adamw is not None:
            self._adamw.param_groups, self._adamw.state = others, self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"] if group.get("use") == "muon" else ():
                if p.grad is not None:
                    self._update(p, p.grad, group)
        if self._adamw is not None:
            self._adamw.step()

    def _update(self, p: nn.Parameter, grad: Tensor, group: Mapping[str, Any]) -> None:
        state, momentum, pieces = self.state[p], group["momentum"], self._pieces[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        mean = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        update = grad.lerp(mean, momentum) if self._settings.nesterov else mean

        full = pieces.gather(update.to(getattr(torch, group["ns_dtype"])))
        step = pieces.mine(orthogonalized(full, self._settings))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(step, alpha=-group["lr"] * scale(pieces.shape, self._settings.adjust_lr_fn))


def orthogonalized(g: Tensor, settings: Settings) -> Tensor:
    """Returns ``g`` with all singular values near 1, by the Newton-Schulz iteration in the dtype of ``g``."""
    a, b, c = settings.ns_coefficients
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / x.norm().clamp(min=settings.eps)  # so that no singular value is above 1
    for _ in range(settings.ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if g.shape[0] > g.shape[1] else x


def scale(shape: tuple[int, ...], how: str) -> float:
    """Returns the factor of the rate for a matrix of ``shape``.

    "original" goes by the ratio of its dims; otherwise updates get the size of AdamW's.
    """
    rows, columns = shape
    return sqrt(max(1.0, rows / columns)) if how == "original" else 0.2 * sqrt(max(rows, columns))


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
        """Updates one parameter after the other, so that temporaries have the size of one parameter."""
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
    """Updates ``p`` and ``mean`` in place.

    Products are rounded before they are added, because a fused multiply-add rounds differently, and the sign
    would show that.
    """
    now, kept = betas
    sign = mean.mul(now).add_(grad.mul(1 - now)).sign_()
    p.mul_(1 - lr * weight_decay).add_(sign, alpha=-lr)
    mean.mul_(kept).add_(grad.mul(1 - kept))
