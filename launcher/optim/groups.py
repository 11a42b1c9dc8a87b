"""Groups parameters so that one optimizer kernel can update each group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from launcher.plan.values.param_group import ParamGroup

Named = Sequence[tuple[str, nn.Parameter]]
Grouped = Sequence[tuple[ParamGroup, Named]]
"""This rank's parameters by the groups of the plan."""


def groups(grouped: Grouped) -> list[dict[str, Any]]:
    """Return groups as torch takes them, with names, in order of first appearance.

    All parameters of a group are plain, or DTensors on one mesh: fused and foreach kernels refuse a mixture.
    """
    found: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    settings: dict[Any, dict[str, Any]] = {}
    for i, (group, params) in enumerate(grouped):
        for name, p in params:
            kind = i, p.device_mesh if isinstance(p, DTensor) else None
            found.setdefault(kind, []).append((name, p))
            settings[kind] = dict(group.settings)
    return [{"params": named, **settings[kind]} for kind, named in found.items()]


def flat(grouped: Grouped) -> list[tuple[str, nn.Parameter]]:
    """Return the names and parameters of all groups, group after group."""
    return [pair for _, params in grouped for pair in params]


def replaced(grouped: Grouped, tensors: Iterable[nn.Parameter]) -> Grouped:
    """Return ``grouped`` with ``tensors`` in place of its parameters, in the order of ``flat``."""
    left = iter(tensors)
    return [(group, [(name, next(left)) for name, _ in params]) for group, params in grouped]
