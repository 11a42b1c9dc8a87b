"""Chooses the kernel of a node, and the kernel of attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from launcher.extras.device_matrix.run.kernels_of_sums import (
    batch_norm,
    bias_once,
    class_loss,
    drawn,
    dropout,
    embedding,
    feature_dropout,
    layer_norm,
    logsumexp,
    mean,
    softmax,
)
from launcher.extras.device_matrix.run.local_operators import Collectives, LocalCall, Run, own_op


def attention(call: LocalCall, run: Run) -> Run:
    """Drops the keys after this rank's last query; a mask says which of the others each query sees."""
    causal = len(call.node.args) > 5 and call.node.args[5] is True
    ways = call.ways("l")
    if not causal or ways == 1:
        return run
    queries = call.ins[0][-2] // ways
    before = call.part("l") * queries
    scale = call.node.kwarg("scale")
    grouped = call.node.kwarg("enable_gqa") is True
    assert scale is None or isinstance(scale, float)

    def of_part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = min(k.shape[-2], before + queries)
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(before)
        near, values = k[..., :keys, :], v[..., :keys, :]
        return scaled_dot_product_attention(q, near, values, seen, scale=scale, enable_gqa=grouped)

    return of_part


Kernel = Callable[..., tuple[Tensor, ...]]
"""Takes this rank's parts of the inputs in order; returns its parts, or terms, of the outputs."""


def prepare(call: LocalCall, here: Collectives, device: torch.device) -> Kernel:
    """Returns the kernel of ``call``; ``device`` is for operators that create tensors without an input."""
    run = _kernel(call, here, own_op(call, device), device)

    def kernel(*tensors: Tensor) -> tuple[Tensor, ...]:
        out = run(*tensors)
        return (out,) if isinstance(out, Tensor) else tuple(out)

    return kernel


def _kernel(call: LocalCall, here: Collectives, run: Run, device: torch.device) -> Run:
    match call.rule.kernel:
        case "":
            return run
        case "bias_once":
            return bias_once(call, run)
        case "mean":
            return mean(call, run)
        case "embedding":
            return embedding(call, run, device)
        case "softmax":
            return softmax(call, here, run)
        case "logsumexp":
            return logsumexp(call, here, run)
        case "layer_norm" | "rms_norm":
            return layer_norm(call, here, run)
        case "batch_norm":
            return batch_norm(call, here, run)
        case "attention":
            return attention(call, run)
        case "dropout":
            return dropout(call, run)
        case "feature_dropout":
            return feature_dropout(call, run)
        case "drawn":
            return drawn(call, run)
        case "cross_entropy_loss" | "nll_loss" | "nll_loss_nd" | "nll_loss2d":
            return class_loss(call, here, run, device)
        case other:
            raise AssertionError(other)
