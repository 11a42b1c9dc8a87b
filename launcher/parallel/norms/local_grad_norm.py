"""Norms of this rank's own gradients: those of its samples, before any sum over other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from launcher.parallel.local import local, to_host
from launcher.parallel.parallel_model import ParallelModel


@dataclass(frozen=True)
class OwnGradients:
    """Squared norms by names of ``ParallelModel.trainable``, which add up until the end of a step.

    Sharded parameters are measured in full when FSDP2 is about to reduce them: at level1 the sum over micro
    batches, at levels 2 and 3 each micro batch, whose squares are added up. Tensor-parallel parameters are
    measured piece by piece.
    """

    model: ParallelModel
    squares: dict[str, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def see(self, names: Sequence[str], grads: Sequence[torch.Tensor]) -> None:
        """Add the squared norms of ``grads``, computed in fp64 as the global norm is."""
        norms = torch._foreach_norm([local(g) for g in grads], 2, torch.float64)
        for name, n in zip(names, norms, strict=True):
            square = n.square()
            self.squares[name] = self.squares[name] + square if name in self.squares else square

    def see_whole(self) -> None:
        """Add those of unsharded parameters, after a step's last backward and before their sum over ranks."""
        sharded = {p.name for p in self.model.plan.params if p.sharded}
        found = [(n, p.grad) for n, p in self.model.trainable() if self.model.first_name(n) not in sharded]
        has = [(n, g) for n, g in found if g is not None]
        if has:
            self.see(*zip(*has, strict=True))

    def take(self, scale: float) -> dict[str, float]:
        """Return each norm of the step times ``scale``, in the plan's order, and reset all."""
        seen = {n: self.squares[n] for n, _ in self.model.trainable() if n in self.squares}
        self.squares.clear()
        if not seen:
            return {}
        norms = to_host(torch.stack(list(seen.values()))).sqrt().tolist()  # one copy from the device
        return {n: norm * scale for n, norm in zip(seen, norms, strict=True)}


def watch(model: ParallelModel) -> OwnGradients:
    """Measure the gradients of ``model`` from now on."""
    own = OwnGradients(model)
    names = {id(p): n for n, p in model.trainable()}

    def see(params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        own.see([names[id(p)] for p in params], grads)

    for order in model.orders:
        order.see = see
    return own
