"""Shards a part's parameters with FSDP2 as the plan lays them out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from launcher.parallel.mesh import Meshes
from launcher.parallel.read import dtype_of
from launcher.parallel.split import Part
from launcher.plan.fusion import Group
from launcher.plan.plan import Plan


def shard(part: Part, plan: Plan, meshes: Meshes) -> None:
    """One FSDP2 group a ``plan.groups`` row, and the part as the root. Parameters that stay whole are left alone.

    Gradients are summed, never averaged: the loss carries the whole scale (``runtime.pipeline``).
    """
    if plan.hsdp is None:
        return
    whole = {t for p, _, t in part.named(plan.params) if not p.sharded and isinstance(t, nn.Parameter)}
    again, casts = plan.hsdp.optimizer_level == "level3", _casts(plan)
    mine = [g for g in plan.groups if g.stage == part.stage.index and g.modules != ("",)]
    for group in mine:
        _shard([part.module.get_submodule(m) for m in group.modules], meshes, again, whole, casts)
    _shard([part.module], meshes, again, whole, casts)
    if again:
        _order(part.module, mine)
    for module in part.module.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _order(root: nn.Module, groups: list[Group]) -> None:
    """Gather ahead, going backward, only what is needed next.

    FSDP2 would go by the forwards it has seen, and with several micro batches in flight gather what nobody needs.
    """
    before = None
    for group in groups:
        first = root.get_submodule(group.modules[0])
        assert isinstance(first, FSDPModule)
        first.set_modules_to_backward_prefetch([before if before is not None and group.chained else first])
        before = first
    assert isinstance(root, FSDPModule)
    root.set_modules_to_backward_prefetch([before or root])


def _casts(plan: Plan) -> MixedPrecisionPolicy:
    """Inputs are left as they are: what a module is given must not depend on where the groups lie."""
    if not plan.dtypes.mixed:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    low, reduce = dtype_of(plan.dtypes.compute), dtype_of(plan.dtypes.reduce)
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce, cast_forward_inputs=False)


def _shard(
    modules: list[nn.Module], meshes: Meshes, again: bool, whole: set[nn.Parameter], casts: MixedPrecisionPolicy
) -> None:
    for module in modules:
        module.register_forward_hook(_no_views)  # before FSDP2's own
    fully_shard(modules, mesh=meshes.shard, reshard_after_forward=again, ignored_params=whole, mp_policy=casts)


def _no_views(module: nn.Module, args: Any, output: Any) -> Any:
    """FSDP2 hooks the output's backward; ``+=`` on a view would drop that hook in silence, and with it the gather."""
    return tree_map_only(torch.Tensor, lambda t: t.clone() if t.requires_grad and t._is_view() else t, output)
