"""Which operations each kind of ``parallel.recompute.keep`` stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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
"""By their names in ATen, without overloads."""


@cache
def _named(kinds: tuple[str, ...]) -> frozenset[str]:
    return frozenset[str]().union(*(KINDS[kind] for kind in kinds))


def is_kept(func: Any, kinds: Iterable[str]) -> bool:
    """Whether the result of an ATen operation is kept."""
    return (
        func._overloadpacket.__name__ in _named(tuple(kinds)) if hasattr(func, "_overloadpacket") else False
    )


def contexts(kinds: tuple[str, ...]) -> Callable[[], Any]:
    """Those that torch runs the forward in, and the forward that is run again."""

    def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(func, kinds) else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(policy)
