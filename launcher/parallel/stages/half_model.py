"""Casts a whole model to half precision."""

from __future__ import annotations

from torch import nn

from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.trace.model_facts import dtype_of, skeleton
from launcher.plan.partition.params import wide


def narrow(model: nn.Module, compute: str) -> None:
    """Cast a whole model's weights in place; buffers, and what stands beside a running statistic, stay."""
    known = skeleton(model)
    kept = wide(known)
    own = dict(model.named_parameters(remove_duplicate=False))
    for p in known.params:
        if p.same_as == p.name and p.name not in kept and p.spec.dtype.startswith("float"):
            own[p.name].data = own[p.name].data.to(dtype_of(compute))


def narrowed(model: nn.Module, compute: str) -> nn.Module:
    """A copy of ``model`` that computes in ``compute``."""
    model = copied(model)
    narrow(model, compute)
    return model
