"""Shards a part's parameters with FSDP2 as the plan lays them out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_map_only

from launcher.parallel.mesh import Meshes
from launcher.parallel.split import Part
from launcher.plan.plan import Plan


def shard(part: Part, plan: Plan, meshes: Meshes) -> None:
    """One FSDP2 group a ``plan.groups`` row, and the part as the root. Parameters that stay whole are left alone.

    Gradients are summed, never averaged: the loss carries the whole scale (``runtime.pipeline``).
    """
    if plan.hsdp is None:
        return
    whole = {t for p, _, t in part.named(plan.params) if not p.sharded and isinstance(t, nn.Parameter)}
    again = plan.hsdp.optimizer_level == "level3"
    for group in plan.groups:
        if group.stage == part.stage.index and group.module:
            _shard(part.module.get_submodule(group.module), meshes, again, whole)
    _shard(part.module, meshes, again, whole)
    for module in part.module.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _shard(module: nn.Module, meshes: Meshes, again: bool, whole: set[nn.Parameter]) -> None:
    module.register_forward_hook(_no_views)  # before FSDP2's own
    fully_shard(module, mesh=meshes.shard, reshard_after_forward=again, ignored_params=whole)


def _no_views(module: nn.Module, args: Any, output: Any) -> Any:
    """FSDP2 hooks the output's backward; ``+=`` on a view would drop that hook in silence, and with it the gather."""
    return tree_map_only(torch.Tensor, lambda t: t.clone() if t.requires_grad and t._is_view() else t, output)
