"""Shards with FSDP2 as the plan says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

from launcher.parallel.copied_weight_changes import LostChanges, Used, state_of
from launcher.parallel.dispatch.containers import clone_with_strides, tensors
from launcher.parallel.dispatch.modes import tree_map_only
from launcher.parallel.local_tensors import local
from launcher.parallel.mesh import Meshes
from launcher.parallel.stages import StagePart
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.plan import Plan

SUMS_APART = hasattr(FSDPParam, "to_accumulated_grad_if_needed")
"""Before torch 2.15, sums of half-precision gradients were kept separate from the gradients."""


def shard(part: StagePart, plan: Plan, meshes: Meshes) -> None:
    """Makes one FSDP2 group per row of ``plan.groups``, and the part the root.

    Unsharded parameters are left alone. Gradients are summed, never averaged: the loss carries the full
    scale (``runtime.training.pipeline``). ``GatherOrder`` decides when.
    """
    if plan.hsdp is None:
        return
    _pass_missing_gradients()

    # exclude unsharded parameters, and make the others contiguous
    unsharded = {t for p, _, t in part.named(plan.params) if not p.sharded and isinstance(t, nn.Parameter)}
    for t in part.module.parameters():  # FSDP2 requires that
        if t not in unsharded and not t.is_contiguous():
            t.data = t.data.contiguous()

    # the groups, and the rest with the root
    casts = _casts(plan)
    groups = [g.modules for g in plan.groups if g.stage == part.stage.index and g.modules != ("",)]
    for names in (*groups, ("",)):
        modules = [part.module.get_submodule(name) for name in names]
        for module in modules:
            module.register_forward_hook(_no_views)  # before FSDP2's own

        fully_shard(
            modules,
            mesh=meshes.shard,
            reshard_after_forward=plan.hsdp.optimizer_level == "level3",
            ignored_params=unsharded,
            mp_policy=casts,
        )

    # sum gradients, and give modules their class back
    for module in part.module.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            _restore_class(module)


def _restore_class(module: nn.Module) -> None:
    """Undoes the change of class that FSDP2 makes for its methods; ``ShardedModule`` has them.

    Code of the model that looks at ``type(module)`` would compute something else on shards. The module keeps
    FSDP2's ``__deepcopy__``, which refuses: a copy would share the sharded weights.
    """
    of_fsdp = type(module)
    module.__class__ = of_fsdp.__mro__[2]  # after FSDP2's new class and FSDPModule
    vars(module)["__deepcopy__"] = vars(of_fsdp)["__deepcopy__"]


class ShardedModule(FSDPModule, nn.Module):
    """A module that FSDP2 has sharded, with FSDP2's methods, which torch's pipeline calls.

    Its ``modules()`` yields a module with these methods for each sharded module: FSDP2's methods go through
    ``modules()`` to change all modules below.
    """

    def __new__(cls, module: nn.Module) -> ShardedModule:
        return object.__new__(cls)  # FSDP2's own would make an nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._below: list[ShardedModule] | None = None
        vars(self)[STATE_KEY] = vars(module)[STATE_KEY]  # where torch's pipeline looks for FSDP2's state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.module(*args, **kwargs)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Yields a module with FSDP2's methods for each sharded module, beginning with this one."""
        if self._below is None:  # torch asks several times in each micro batch
            below = (m for m in self.module.modules() if m is not self.module)
            self._below = [ShardedModule(m) for m in below if _get_module_fsdp_state(m) is not None]
        yield self
        yield from self._below

    def _get_fsdp_state(self) -> Any:
        return _get_module_fsdp_state(self.module)


def pipeline_module(module: nn.Module) -> nn.Module:
    """Returns what torch's pipeline calls for ``module``: with FSDP2's methods, if it is sharded."""
    return module if _get_module_fsdp_state(module) is None else ShardedModule(module)


def find_parameters(module: nn.Module) -> None:
    """Lets FSDP2 find the sharded parameters after all tensors of ``module`` have been replaced."""
    for m in module.modules():
        state = _get_module_fsdp_state(m)
        for group in param_groups(state) if state is not None else []:
            for param in group.fsdp_params:
                param.reset_sharded_param()


def fill_dispatch_caches() -> None:
    """Runs the operators with which FSDP2 shards a weight, on tensors without memory.

    Torch's caches for them take 20 ms and 6 MB. Ranks that are forked afterwards share these caches.
    """
    with FakeTensorMode():
        weight = torch.empty_strided((2, 3), (3, 1), device="cpu")
        weight.detach()
        weight.new_zeros((2,))
        weight.view(-1)
        weight[0:1]
        weight.split(1)
        torch.empty_like(weight)


@cache
def _pass_missing_gradients() -> None:
    """Lets FSDP2's node before a module return no gradient for an input that the module does not train.

    The node would return zeros. They would train whatever made the input, such as a weight that has no
    gradient in one process and is decayed for zeros.
    """
    node = RegisterPostBackwardFunction
    name = "setup_context" if "setup_context" in vars(node) else "forward"  # torch 2.11 has only a forward
    original = getattr(node, name)

    def patched(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        return original(ctx, *args)

    setattr(node, name, staticmethod(patched))


def _casts(plan: Plan) -> MixedPrecisionPolicy:
    """Returns the policy of casts; inputs keep their dtype, so that it does not depend on the groups."""
    if not plan.dtypes.mixed:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    low, reduce = dtype_of(plan.dtypes.compute), dtype_of(plan.dtypes.reduce)
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce, cast_forward_inputs=False)


def _no_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Copies outputs that are views: FSDP2 hooks their backward, and ``+=`` would drop the hook unnoticed."""

    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return clone_with_strides(value) if _hooked_view(value) else value
        if is_dataclass(value) and not isinstance(value, type):
            for f in fields(value):
                inner = getattr(value, f.name, None)
                if any(map(_hooked_view, tensors(inner))):
                    object.__setattr__(value, f.name, tree_map_only(object, copy, inner))
        return value

    return tree_map_only(object, copy, output) if any(map(_hooked_view, tensors(output))) else output


def _hooked_view(t: torch.Tensor) -> bool:
    return t.requires_grad and t._is_view()


def param_groups(state: Any) -> list[Any]:
    """Returns FSDP2's parameter groups of one module; before torch 2.12 there was at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def end_backward(state: Any) -> None:
    """Runs the end-of-backward hooks of FSDP2's root, even if backward passed none of its modules.

    Since torch 2.15 they first note whether the caller ends the step.
    """
    context = state._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = context.manual_backward_finalization
    state._root_post_backward_final_callback()
    finish_reductions(state)


def finish_reductions(state: Any) -> None:
    """Drops what FSDP2 keeps of a backward that reduced its gradients.

    Before torch 2.15 its own hooks did so; under a pipeline they now leave it to the end of the step.
    """
    if hasattr(state, "wait_for_gradient_reduction") and state._state_ctx.is_last_backward:
        state.wait_for_gradient_reduction()


@dataclass(frozen=True)
class HalfWeight:
    """A parameter in master precision, the dtype of its copy, and its places: (module, attribute)."""

    kept: nn.Parameter
    dtype: torch.dtype
    places: tuple[tuple[nn.Module, str], ...]


@dataclass(frozen=True)
class HalfWeights:
    """The unsharded weights of a part that runs in half precision.

    As FSDP2 does for shards, each step makes new half-precision copies, and the gradient of each micro batch
    is added up in the master precision. ``lost`` has the changes that modules made to the copies.
    """

    weights: tuple[HalfWeight, ...]
    lost: LostChanges = field(default_factory=LostChanges)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Uses the half-precision copies as the modules' parameters while entered."""
        lows = _cast([w.kept.detach() for w in self.weights], [w.dtype for w in self.weights])
        copies = []
        for w, made in zip(self.weights, lows, strict=True):
            low = nn.Parameter(made, w.kept.requires_grad)
            copies.append((w.kept, low, state_of(low)))
            for module, name in w.places:
                module._parameters[name] = low
        try:
            yield
            for kept, low, before in copies:
                self.lost.note(kept, low, before)
            if torch.is_grad_enabled():
                self.lost.compare([Used(kept, local(kept), local(low)) for kept, low, _ in copies])
        finally:
            for w in self.weights:
                for module, name in w.places:
                    module._parameters[name] = w.kept

    @torch.no_grad()
    def collect(self) -> None:
        """Adds the gradients of the copies to the master parameters, after a backward."""
        for w in self.weights:
            module, name = w.places[0]
            low = module._parameters[name]
            if low is None or low.grad is None:
                continue
            if w.kept.grad is None:
                w.kept.grad = low.grad.to(w.kept.dtype)
            else:
                local(w.kept.grad).add_(local(low.grad))
            low.grad = None


def _cast(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Casts each tensor to its dtype; on a device in a few kernels, instead of one launch per tensor."""
    if not tensors or any(type(t) is not torch.Tensor for t in tensors):
        return [t.to(dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
    made = [torch.empty_like(t, dtype=dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
    torch._foreach_copy_(made, list(tensors))
    return made


def half_weights(part: StagePart, plan: Plan) -> HalfWeights:
    """Returns the half-precision weights of ``part``; none if the plan computes in the master precision."""
    named = part.named(plan.params)
    low = {id(t): p.compute for p, _, t in named if not p.sharded and p.compute != p.spec.dtype}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    kept: dict[int, nn.Parameter] = {}
    for module in part.module.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) in low:
                places.setdefault(id(p), []).append((module, name))
                kept[id(p)] = p
    return HalfWeights(tuple(HalfWeight(p, dtype_of(low[i]), tuple(places[i])) for i, p in kept.items()))
