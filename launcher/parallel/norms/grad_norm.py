"""The global gradient norm over any mix of layouts: replicated numbers count once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from launcher.parallel.local import grad, local, to_host
from launcher.parallel.parallel_model import ParallelModel


@dataclass(frozen=True)
class Norm:
    """This rank's pieces with their weights: one that n ranks hold (replicas, tied copies) counts 1/n."""

    pieces: tuple[tuple[torch.Tensor, float], ...]
    copies: tuple[torch.Tensor, ...]

    def squared(self) -> torch.Tensor:
        """This rank's share of the squared global norm (fp64, 0-d, CPU), which is the sum over all ranks."""
        return self.squared_beside(torch.zeros((), dtype=torch.float64))[1]

    @torch.no_grad()
    def squared_beside(self, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``number`` (fp64, 0-d) and what ``squared`` returns, in one copy from their device to the CPU.

        It is the only one of a step: the CPU waits for its device here, and besides only where a gradient
        is missing, to know whether it is on all ranks.
        """
        # what counts of this rank's gradients
        every = [(grad(p), weight) for p, weight in self.pieces]
        found = [(g, weight) for g, weight in every if g is not None and g.numel()]
        if not found:
            return to_host(number), torch.zeros((), dtype=torch.float64)

        # in fp64: a CPU adds a million squares in fp32 to no more than five digits
        norms = torch.stack(torch._foreach_norm([g for g, _ in found], 2, torch.float64))
        both = to_host(torch.cat([number.to(norms.device).reshape(1), norms]))
        weights = torch.tensor([weight for _, weight in found], dtype=torch.float64)
        return both[0], both[1:].square() @ weights

    @torch.no_grad()
    def clip(self, norm: float, limit: float | None, scaled: float = 1.0) -> None:
        """Scale every gradient so that the global ``norm`` is at most ``limit``, as ``clip_grad_norm_`` does.

        ``norm`` is that of the gradients divided by ``scaled``, which they are too.
        """
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        grads = [local(p.grad) for p in self.copies if p.grad is not None]  # redistributed ones would be lost
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
