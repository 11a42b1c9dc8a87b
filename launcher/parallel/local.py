"""This rank's shard of a tensor, or of its gradient, as a plain tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from launcher.plan.values.layout import Box


def local(t: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is. Shares memory."""
    return t.to_local() if isinstance(t, DTensor) else t


def flags(each: Sequence[bool], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return ones and zeros, filled on ``device``: copying a list to it would make the CPU wait."""
    out = torch.ones(len(each), device=device, dtype=dtype)
    for i, one in enumerate(each):
        if not one:
            out[i].zero_()
    return out


def to_host(t: torch.Tensor) -> torch.Tensor:
    """Return ``t`` on the CPU, which waits for all earlier work of its device."""
    return t.cpu()


def grad(p: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's piece of the gradient, with the placements of the parameter, or ``None``.

    After tensor parallelism a gradient's placements can differ from its parameter's.
    """
    g = p.grad
    if isinstance(g, DTensor) and isinstance(p, DTensor) and g.placements != p.placements:
        g = g.redistribute(placements=p.placements)
    return None if g is None else local(g)


def cut(full: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the part of ``full`` inside ``box``."""
    for dim, (a, b) in enumerate(zip(box.lo, box.hi, strict=True)):
        full = full.narrow(dim, a, b - a)
    return full
