"""The tensors that this rank has: its shard of a DTensor, and the part of a full tensor inside a box."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from launcher.plan.values.layout import Box


def local(t: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, or the plain tensor itself; the result shares its memory."""
    return t.to_local() if isinstance(t, DTensor) else t


def grad(p: Tensor) -> Tensor | None:
    """Returns this rank's piece of the gradient, with the placements of the parameter, or ``None``.

    After tensor parallelism a gradient's placements can differ from its parameter's.
    """
    g = p.grad
    if isinstance(g, DTensor) and isinstance(p, DTensor) and g.placements != p.placements:
        g = g.redistribute(placements=p.placements)
    return None if g is None else local(g)


def cut(full: Tensor, box: Box) -> Tensor:
    """Returns the part of ``full`` inside ``box``; it shares memory."""
    for dim, (a, b) in enumerate(zip(box.lo, box.hi, strict=True)):
        full = full.narrow(dim, a, b - a)
    return full
