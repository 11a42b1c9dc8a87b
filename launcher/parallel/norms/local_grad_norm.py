"""Norms of this rank's own gradients: of its samples, before any sum over other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from launcher.parallel.local import local, to_host
from launcher.parallel.parallel_model import ParallelModel


@dataclass(frozen=True)
class OwnGradients:
    """``squares`` grow from step to step's end; names are those of ``ParallelModel.trainable``.

    Sharded parameters are seen whole as FSDP2 is about to reduce them: the sum over micro batches at
    level1, each micro batch by itself at levels 2 and 3, where their squares are added up. Cut operators
    are seen piece by piece.
    """

    model: ParallelModel
    squares: dict[str, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def see(self, names: Sequence[str], grads: Sequence[torch.Tensor]) -> None:
        """Add the squared norms of ``grads``, worked out in fp64 as the global norm is."""
        norms = torch._foreach_norm([local(g) for g in grads], 2, torch.float64)
        for name, n in zip(names, norms, strict=True):
            square = n.square()
            self.squares[name] = self.squares[name] + square if name in self.squares else square

    def see_whole(self) -> None:
        """Those of parameters that stay whole: after a step's last backward, before their sum over ranks."""
        sharded = {p.name for p in self.model.plan.params if p.sharded}
        found = [(n, p.grad) for n, p in self.model.trainable() if self.model.first_name(n) not in sharded]
        has = [(n, g) for n, g in found if g is not None]
        if has:
            self.see(*zip(*has, strict=True))

    def take(self, scale: float) -> dict[str, float]:
        """Each norm of the step, times ``scale``, in the plan's order; the next step starts anew."""
        seen = {n: self.squares[n] for n, _ in self.model.trainable() if n in self.squares}
        self.squares.clear()
        if not seen:
            return {}
        norms = to_host(torch.stack(list(seen.values()))).sqrt().tolist()  # one copy from the device
        return {n: norm * scale for n, norm in zip(seen, norms, strict=True)}


def watch(model: ParallelModel) -> OwnGradients:
    """See the gradients of ``model`` from now on."""
    own = OwnGradients(model)
    names = {id(p): n for n, p in model.trainable()}

    def see(params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        own.see([names[id(p)] for p in params], grads)

    for order in model.orders:
        order.see = see
    return own
