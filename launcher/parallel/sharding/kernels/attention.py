"""Causal attention of a part of the queries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.parallel.sharding.kernels.torch_op import Run


def attention(call: LocalCall, run: Run) -> Run:
    """Drop the keys after this rank's last query; a mask says which of the others each query sees."""
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
