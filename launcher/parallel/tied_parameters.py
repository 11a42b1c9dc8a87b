"""Tied parameters on several stages: adds their gradients, and makes their copies equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from launcher.parallel.gradient_all_reduce import all_reduce_gradients
from launcher.parallel.local_tensors import local
from launcher.parallel.mesh import Meshes
from launcher.parallel.stages import StagePart
from launcher.plan.plan import Plan


@dataclass(frozen=True)
class Tied:
    """One rank's copies of tied tensors on the same pipeline ranks.

    A sharded tensor has a copy for each of the rank's stages. Tensors that are not ``trained`` have no
    gradients.
    """

    names: tuple[str, ...]
    copies: tuple[tuple[torch.Tensor, ...], ...]
    group: dist.ProcessGroup | None
    trained: bool

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums gradients over this rank's copies, then over the ranks; every copy gets the sum."""
        if not self.trained:
            return
        for first, *others in self.copies:
            for t in others:
                if first.grad is None:
                    first.grad = t.grad
                elif t.grad is not None:
                    local(first.grad).add_(local(t.grad))

        # over the ranks, and back to every copy
        if self.group is not None:
            all_reduce_gradients(tuple(same[0] for same in self.copies), self.group)
        for first, *others in self.copies:
            for t in others:
                t.grad = None if first.grad is None else first.grad.clone()

    @torch.no_grad()
    def sync(self) -> None:
        """Makes every copy equal to the first stage's, whatever their present values."""
        for first, *others in self.copies:
            if self.group is not None:
                dist.broadcast(local(first), group_src=0, group=self.group)
            for t in others:
                local(t).copy_(local(first))


def tie(parts: list[StagePart], plan: Plan, meshes: Meshes) -> list[Tied]:
    """Returns one ``Tied`` for each set of pipeline ranks with which this rank shares tensors."""
    # this rank's copies, each tensor once
    copies: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for placed, _, t in part.named(plan.params):
            if all(t is not other for other in copies.setdefault(placed.name, [])):
                copies[placed.name].append(t)

    # tensors of one collective: on the same ranks, in one dtype
    rows: dict[tuple[tuple[int, ...], str, bool], list[str]] = {}
    dtypes = {p.name: p.spec.dtype for p in plan.params}
    for tied in plan.ties:
        if tied.name in copies:
            rows.setdefault((tied.ranks, dtypes[tied.name], tied.trained), []).append(tied.name)
    ties = []
    for (pp, _, trained), names in rows.items():
        same = tuple(tuple(copies[n]) for n in names)
        ties.append(Tied(tuple(names), same, meshes.ties.get(pp), trained))
    return ties
