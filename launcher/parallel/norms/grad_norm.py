"""The global gradient norm over any mix of layouts; replicated values count once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from launcher.parallel.local import grad, local, to_host
from launcher.parallel.parallel_model import ParallelModel


@dataclass(frozen=True)
class Norm:
    """This rank's pieces with their weights: a piece on n ranks (replicas, tied copies) counts 1/n."""

    pieces: tuple[tuple[torch.Tensor, float], ...]
    copies: tuple[torch.Tensor, ...]

    def squared(self) -> torch.Tensor:
        """Return this rank's term of the squared global norm (fp64, 0-d, CPU), which sums over ranks."""
        return self.squared_beside(torch.zeros((), dtype=torch.float64))[1]

    @torch.no_grad()
    def squared_beside(self, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``number`` (fp64, 0-d) and the result of ``squared``, in one copy from device to CPU.

        It is the only copy of a step. Otherwise the CPU waits for the device only if a gradient is missing,
        to learn whether all ranks miss it.
        """
        # the gradients of this rank
        every = [(grad(p), weight) for p, weight in self.pieces]
        found = [(g, weight) for g, weight in every if g is not None and g.numel()]
        if not found:
            return to_host(number), torch.zeros((), dtype=torch.float64)

        # in fp64: a CPU's sum of a million squares in fp32 has five correct digits
        norms = torch.stack(torch._foreach_norm([g for g, _ in found], 2, torch.float64))
        both = to_host(torch.cat([number.to(norms.device).reshape(1), norms]))
        weights = torch.tensor([weight for _, weight in found], dtype=torch.float64)
        return both[0], both[1:].square() @ weights

    @torch.no_grad()
    def clip(self, norm: float, limit: float | None, scaled: float = 1.0) -> None:
        """Scale every gradient so that the global ``norm`` is at most ``limit``, as ``clip_grad_norm_`` does.

        ``norm`` is that of the gradients divided by ``scaled``; the gradients are divided by it here.
        """
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        grads = [local(p.grad) for p in self.copies if p.grad is not None]  # redistributed ones are copies
        if scale / scaled != 1.0 and grads:
            torch._foreach_mul_(grads, scale / scaled)


def build(model: ParallelModel) -> Norm:
    """The norm of ``model``'s gradients on this rank."""
    pieces = []
    for placed, t in model.named():
        box = placed.layout.box(model.meshes.rank)
        if placed.trainable and box is not None and not box.empty:
            pieces.append((t, 1 / len(placed.layout.holders()[box])))
    return Norm(tuple(pieces), tuple(p for _, p in model.trainable()))
