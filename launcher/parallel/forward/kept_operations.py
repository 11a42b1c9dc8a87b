"""The operations that each kind of ``parallel.recompute.keep`` stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from launcher.parallel.dispatch.containers import tensors
from launcher.parallel.dispatch.modes import Dispatch
from launcher.parallel.tensor_parallel.collectives import COLLECTIVES

KINDS: dict[str, frozenset[str]] = {
    "matmul": frozenset({"mm", "addmm", "_scaled_mm", "_grouped_mm"}),
    "batched_matmul": frozenset({"bmm", "baddbmm"}),
    "attention": frozenset({
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward",
        "_efficient_attention_forward", "flex_attention",
    }),
    "convolution": frozenset({"convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"}),
    "normalization": frozenset({
        "native_layer_norm", "native_group_norm", "_fused_rms_norm", "native_batch_norm",
        "_native_batch_norm_legit", "cudnn_batch_norm",
    }),
    "activation": frozenset({"gelu", "silu", "relu", "sigmoid", "tanh", "_softmax", "_log_softmax"}),
    "random": frozenset({"native_dropout", "bernoulli", "rand", "rand_like", "randn", "randn_like"}),
}  # fmt: skip
"""Operations by their names in ATen, without overloads."""
SENT = "sent"
"""Results of tensor-parallel collectives, which are operations of a graph and are kept there."""


@cache
def _named(kinds: tuple[str, ...]) -> frozenset[str]:
    return frozenset[str]().union(*(COLLECTIVES if kind == SENT else KINDS[kind] for kind in kinds))


def is_kept(func: Any, kinds: Iterable[str]) -> bool:
    """Whether the result of an ATen operation is kept."""
    return (
        func._overloadpacket.__name__ in _named(tuple(kinds)) if hasattr(func, "_overloadpacket") else False
    )


class Telling(Dispatch):
    """Reports the kept results to ``keep``; entered around the mode that keeps them.

    Raises the exception that ``refused`` makes if one is changed in place, which below autograd would go
    unnoticed.
    """

    def __init__(
        self,
        kinds: tuple[str, ...],
        keep: Callable[[torch.Tensor], Any],
        refused: Callable[[str], Exception],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds = kinds
        self.keep = keep
        self.refused = refused
        self.kept: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for t in written(func, args, kwargs):
            if name := self.kept.get(t.untyped_storage()._cdata):
                raise self.refused(f"it changes the result of {name} in place, which is to be kept")
        if is_kept(func, self.kinds):
            for t in tensors((out,)):
                self.keep(t)
                self.kept[t.untyped_storage()._cdata] = func._overloadpacket.__name__
        return out


def written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an ATen operation changes in place."""
    for at, a in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if a.alias_info is not None and a.alias_info.is_write:
            yield from tensors((args[at] if at < len(args) else kwargs.get(a.name),))


def contexts(kinds: tuple[str, ...]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts that keep results while a forward runs, and return them while it runs again."""

    def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(func, kinds) else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    first.respect_saved_tensors_hooks = False  # new in torch 2.15; before, hooks never saw kept results
    return first, again
