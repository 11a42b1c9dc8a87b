"""Prepares the function that one rank calls with its parts of the inputs, from a node, rule and strategy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from launcher.parallel.sharding.kernels.attention import attention
from launcher.parallel.sharding.kernels.collectives import Collectives
from launcher.parallel.sharding.kernels.dropout import drawn, dropout, feature_dropout
from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.parallel.sharding.kernels.losses import class_loss
from launcher.parallel.sharding.kernels.norms import batch_norm, layer_norm
from launcher.parallel.sharding.kernels.softmax import logsumexp, softmax
from launcher.parallel.sharding.kernels.sums import bias_once, embedding, mean
from launcher.parallel.sharding.kernels.torch_op import Run, own_op

Kernel = Callable[..., tuple[Tensor, ...]]
"""Takes this rank's parts of the inputs in order; returns its parts, or terms, of the outputs."""


def prepare(call: LocalCall, here: Collectives, device: torch.device) -> Kernel:
    """Return the kernel of ``call``; ``device`` is for operators that create tensors without an input."""
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
