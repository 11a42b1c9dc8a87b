"""Casts a model to half precision, in place."""

from __future__ import annotations

from torch import nn

from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.trace.model_structure import skeleton
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.cut.tensor_placement import full_precision_names
from launcher.plan.plan import Plan


def cast_weights(model: nn.Module, compute: str) -> None:
    """Casts a full model's weights in place, except those of modules with running statistics."""
    known = skeleton(model)
    kept = full_precision_names(known)
    own = dict(model.named_parameters(remove_duplicate=False))
    for p in known.params:
        if p.same_as == p.name and p.name not in kept and p.spec.dtype.startswith("float"):
            own[p.name].data = own[p.name].data.to(dtype_of(compute))


def cast_frozen_weights(model: nn.Module, plan: Plan) -> None:
    """Casts in place the frozen weights that the plan stores in fewer bits than their constructor does."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for p in plan.params:
        if not p.trainable and not p.buffer:
            own[p.name].data = own[p.name].data.to(dtype_of(p.spec.dtype))


def with_cast_weights(model: nn.Module, compute: str) -> nn.Module:
    """Returns a copy of ``model`` that computes in ``compute``."""
    model = copied(model)
    cast_weights(model, compute)
    return model
