"""The flops of an operator and the bytes that it reads."""

from __future__ import annotations

from math import prod

from launcher.extras.device_matrix.op_graph import OpGraph, OpNode

PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "dot", "inner", "outer",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
    "scaled_dot_product_attention",
}  # fmt: skip
"""Kinds whose flops are counted; the time of others depends on their bytes."""

VIEWS = {
    "view", "reshape", "_unsafe_view", "transpose", "permute", "t", "numpy_T", "flatten", "unflatten",
    "expand", "expand_as", "unsqueeze", "squeeze", "slice", "select", "narrow", "split", "split_with_sizes",
    "chunk",
    "unbind", "alias", "detach", "movedim", "swapaxes", "swapdims", "view_as", "reshape_as", "diagonal",
}  # fmt: skip
"""Kinds that move no bytes: their output shares the memory of their input."""

LOOKUPS = {"embedding", "index_select", "gather", "index"}
"""Kinds that read only as many bytes of their first input as their output has."""


def is_view(graph: OpGraph, node: OpNode) -> bool:
    """Returns true if the output of ``node`` takes no additional memory."""
    if node.kind == "to":
        return bool(node.ins) and graph.values[node.ins[0]].spec == graph.values[node.outs[0]].spec
    return node.kind in VIEWS


def forward_flops(graph: OpGraph, node: OpNode) -> int:
    """Returns the flops over all ranks, without repeated computation.

    It is 0 for kinds whose time depends on bytes. A causal attention computes half of its scores.
    """
    if node.kind not in PRODUCTS:
        return 0
    shapes, (out, *_) = graph.shapes(node), graph.makes(node)
    match node.kind:
        case "scaled_dot_product_attention":
            query, _, value = shapes[:3]
            causal = dict(enumerate(node.args)).get(5, node.kwarg("is_causal", False)) is True
            scores = prod(query[:-1]) * shapes[1][-2]
            return scores * (query[-1] + value[-1]) * (1 if causal else 2)
        case "addmm" | "addmv" | "baddbmm" | "addbmm":
            return 2 * prod(shapes[1]) * (shapes[2][-1] if len(shapes[2]) > 1 else 1)
        case kind if "transpose" in kind:
            return 2 * prod(shapes[0]) * prod(shapes[1][1:])
        case kind if kind.startswith("conv"):
            return 2 * prod(out) * prod(shapes[1][1:])
        case "outer":
            return prod(out)
        case _:
            return 2 * prod(out) * shapes[0][-1]


def reads(graph: OpGraph, node: OpNode) -> tuple[int, ...]:
    """Returns the bytes that the forward reads of each input, over all ranks."""
    sizes = [graph.values[v].spec.nbytes for v in node.ins]
    if node.kind in LOOKUPS and sizes:
        sizes[0] = graph.values[node.outs[0]].spec.nbytes
    return tuple(sizes)
