"""Norms of the gradients that are this rank's own: of its samples, before any sum over other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from launcher.parallel.live import Parallel
from launcher.parallel.local import local
from launcher.parallel.shard import param_groups


@dataclass(frozen=True)
class Own:
    """``squares`` grow from step to step's end; names are those of ``Parallel.trainable``.

    Sharded parameters are seen whole as FSDP2 is about to reduce them: the sum over micro batches at level1, each micro
    batch by itself at levels 2 and 3, where their squares are added up. Cut operators are seen piece by piece.
    """

    model: Parallel
    squares: dict[str, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def see(self, names: Sequence[str], grads: Sequence[torch.Tensor]) -> None:
        """Add the squared norms of ``grads``, worked out in fp64 as the global norm is."""
        norms = torch._foreach_norm([local(g) for g in grads], 2, torch.float64)
        for name, n in zip(names, norms, strict=True):
            square = n.square()
            self.squares[name] = self.squares[name] + square if name in self.squares else square

    def see_whole(self) -> None:
        """Those of parameters that stay whole, between the last backward of a step and their sum over ranks."""
        sharded = {p.name for p in self.model.plan.params if p.sharded}
        found = [(n, p.grad) for n, p in self.model.trainable() if n.partition("@")[0] not in sharded]
        has = [(n, g) for n, g in found if g is not None]
        if has:
            self.see(*zip(*has, strict=True))

    def take(self, scale: float) -> dict[str, float]:
        """Each norm of the step, times ``scale``, in the plan's order; the next step starts anew."""
        out = {n: self.squares[n].sqrt().item() * scale for n, _ in self.model.trainable() if n in self.squares}
        self.squares.clear()
        return out


def watch(model: Parallel) -> Own:
    """See the gradients of ``model`` from now on."""
    own = Own(model)
    names = {id(p): n for n, p in model.trainable()}
    for group in _groups(model):
        group.post_backward = partial(_before, group, group.post_backward, names, own.see)
    return own


def _groups(model: Parallel) -> Iterator[Any]:
    """FSDP2's private parameter groups: no public hook sees a gradient between backward and its reduction."""
    for part in model.parts:
        for module in part.module.modules():
            if isinstance(module, FSDPModule):
                yield from param_groups(module._get_fsdp_state())


def _before(
    group: Any, reduce: Callable[..., Any], names: dict[int, str], see: Callable[..., None], *unused: Any
) -> Any:
    """What FSDP2 calls after each backward, with a look at what it is about to reduce."""
    if group.reduce_grads:
        found = []
        for p in group.fsdp_params:
            p.accumulate_unsharded_grad_if_needed()
            has = p.unsharded_accumulated_grad
            has = p.unsharded_param.grad if has is None and hasattr(p, "_unsharded_param") else has
            if has is not None:
                found.append((names[id(p.sharded_param)], has))
        if found:
            see(*zip(*found, strict=True))
    return reduce(*unused)
