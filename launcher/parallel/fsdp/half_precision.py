"""Half-precision copies of the weights that FSDP2 does not cast, renewed in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from launcher.parallel.local import local
from launcher.parallel.stages.split import StagePart
from launcher.parallel.trace.model_facts import dtype_of
from launcher.plan.plan import Plan


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
    is added up in the master precision.
    """

    weights: tuple[HalfWeight, ...]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Use the half-precision copies as the modules' parameters while entered."""
        lows = _cast([w.kept.detach() for w in self.weights], [w.dtype for w in self.weights])
        for w, made in zip(self.weights, lows, strict=True):
            low = nn.Parameter(made, w.kept.requires_grad)
            for module, name in w.places:
                module._parameters[name] = low
        try:
            yield
        finally:
            for w in self.weights:
                for module, name in w.places:
                    module._parameters[name] = w.kept

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the copies to the master parameters, after a backward."""
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
    """Cast each tensor to its dtype; on a device in a few kernels, instead of one launch per tensor."""
    if not tensors or any(type(t) is not torch.Tensor for t in tensors):
        return [t.to(dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
    made = [torch.empty_like(t, dtype=dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
    torch._foreach_copy_(made, list(tensors))
    return made


def half_weights(part: StagePart, plan: Plan) -> HalfWeights:
    """Return the half-precision weights of ``part``; none if the plan computes in the master precision."""
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
