"""Global and local norms of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from launcher.parallel.local_tensors import grad, local
from launcher.parallel.mesh import to_host
from launcher.parallel.parallel_model import ParallelModel


@dataclass(frozen=True)
class Norm:
    """This rank's pieces with their weights: a piece on n ranks (replicas, tied copies) counts 1/n."""

    pieces: tuple[tuple[torch.Tensor, float], ...]
    copies: tuple[torch.Tensor, ...]

    def squared(self) -> torch.Tensor:
        """Returns this rank's term of the squared global norm (fp64, 0-d, CPU); the norm sums over ranks."""
        return self.squared_beside(torch.zeros((), dtype=torch.float64))[1]

    @torch.no_grad()
    def squared_beside(self, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``number`` (fp64, 0-d or 1-d) and the result of ``squared``, in one copy to the CPU.

        It is the only copy of a step. Apart from it the CPU waits for the device only if a gradient is
        missing, to learn whether it is missing on all ranks.
        """
        # the gradients of this rank
        every = [(grad(p), weight) for p, weight in self.pieces]
        weighted_grads = [(g, weight) for g, weight in every if g is not None and g.numel()]
        if not weighted_grads:
            return to_host(number), torch.zeros((), dtype=torch.float64)

        # in fp64: a CPU's sum of a million squares in fp32 has five correct digits
        norms = torch.stack(torch._foreach_norm([g for g, _ in weighted_grads], 2, torch.float64))
        both = to_host(torch.cat([number.to(norms.device).reshape(-1), norms]))
        own, norms = both.split([number.numel(), len(norms)])
        weights = torch.tensor([weight for _, weight in weighted_grads], dtype=torch.float64)
        return own.reshape(number.shape), norms.square() @ weights

    @torch.no_grad()
    def clip(self, norm: float, limit: float | None, loss_scale: float = 1.0) -> None:
        """Scales all gradients so that the global ``norm`` is at most ``limit``, as ``clip_grad_norm_`` does.

        ``norm`` is the norm of the gradients after division by ``loss_scale``; this also divides them.
        """
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        grads = [
            local(p.grad) for p in self.copies if p.grad is not None
        ]  # not grad(p): it may be a redistributed copy
        if scale / loss_scale != 1.0 and grads:
            torch._foreach_mul_(grads, scale / loss_scale)


def build(model: ParallelModel) -> Norm:
    """Returns the ``Norm`` of the gradients of ``model`` on this rank."""
    pieces = []
    for placed, t in model.named():
        box = placed.layout.box(model.meshes.rank)
        if placed.trainable and box is not None and not box.empty:
            pieces.append((t, 1 / len(placed.layout.holders()[box])))
    return Norm(tuple(pieces), tuple(p for _, p in model.trainable()))


@dataclass(frozen=True)
class OwnGradients:
    """Squared norms of this rank's gradients, by their names in ``ParallelModel.trainable``.

    They add up until the end of a step. The gradient of a sharded parameter is measured in full just before
    FSDP2 reduces it: at level1 the sum over micro batches, at levels 2 and 3 that of each micro batch, and
    the squares are added. Tensor-parallel parameters are measured piece by piece.
    """

    model: ParallelModel
    squares: dict[str, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def see(self, names: Sequence[str], grads: Sequence[torch.Tensor]) -> None:
        """Adds the squared norms of ``grads``, computed in fp64 as the global norm is."""
        norms = torch._foreach_norm([local(g) for g in grads], 2, torch.float64)
        for name, n in zip(names, norms, strict=True):
            square = n.square()
            self.squares[name] = self.squares[name] + square if name in self.squares else square

    def see_unsharded(self) -> None:
        """Adds the squared norms of unsharded parameters.

        Call it after a step's last backward, before their gradients are summed over ranks.
        """
        sharded = {p.name for p in self.model.plan.params if p.sharded}
        unsharded = [
            (n, p.grad) for n, p in self.model.trainable() if self.model.first_name(n) not in sharded
        ]
        has = [(n, g) for n, g in unsharded if g is not None]
        if has:
            self.see(*zip(*has, strict=True))

    def take(self, scale: float) -> dict[str, float]:
        """Returns each norm of the step times ``scale``, in the plan's order, and reset all."""
        squares = {n: self.squares[n] for n, _ in self.model.trainable() if n in self.squares}
        self.squares.clear()
        if not squares:
            return {}
        norms = to_host(torch.stack(list(squares.values()))).sqrt().tolist()  # one copy from the device
        return {n: norm * scale for n, norm in zip(squares, norms, strict=True)}


def watch(model: ParallelModel) -> OwnGradients:
    """Measures the gradients of ``model`` from now on."""
    own = OwnGradients(model)
    names = {id(p): n for n, p in model.trainable()}

    def see(params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        own.see([names[id(p)] for p in params], grads)

    for order in model.orders:
        order.see = see
    return own
