"""Groups parameters so that one optimizer kernel can update each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

Named = Sequence[tuple[str, nn.Parameter]]


def groups(params: Named, weight_decay: float) -> list[dict[str, Any]]:
    """Groups of one kind each, in order of first appearance, named.

    A kind is where a tensor lives (plain, or the mesh of a DTensor: fused and foreach kernels refuse a
    mixture) and whether it decays: tensors of two or more dims do; gains and biases do not.
    """
    found: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    for name, p in params:
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        found.setdefault((mesh, p.ndim >= 2), []).append((name, p))
    decay = {True: weight_decay, False: 0.0}
    return [{"params": named, "weight_decay": decay[many]} for (_, many), named in found.items()]
