"""Default strategies of operators without a written one (mode ``semi_auto``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, prod

from launcher.plan.sharding.op_graph import OpGraph, OpNode
from launcher.plan.sharding.op_rule import OpRule, OpStrategy
from launcher.plan.sharding.tensor_layout import TensorLayout

HEAVY = frozenset(
    {
        "linear", "addmm", "mm", "embedding", "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d",
        "conv_transpose2d", "conv_transpose3d",
    }
)  # fmt: skip
"""Operators with weights. MindSpore gives those without a strategy data parallelism."""


def assign(
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    ranks: int,
    *,
    written: Mapping[int, OpStrategy],
    given: Mapping[int, TensorLayout],
    rests: Mapping[int, TensorLayout],
) -> tuple[OpStrategy, ...]:
    """Returns a strategy for each node.

    An operator without a written strategy is cut along its samples if it has weights; otherwise it follows
    the layouts of its inputs.

    Args:
        graph: the operators of a stage.
        rules: the rule of each node; ``None`` for a node that runs on full tensors.
        ranks: the number of ranks of the stage.
        written: strategies from the request, by place of the node.
        given: layouts of the graph's inputs, by value.
        rests: layouts in which other values rest, by value.
    """
    layouts = dict(given)
    out = []
    for at, (node, rule) in enumerate(zip(graph.nodes, rules, strict=True)):
        strategy = written.get(at)
        if strategy is None:
            strategy = _default(graph, node, rule, ranks=ranks, layouts=layouts)
        out.append(strategy)
        for place, value in enumerate(node.outs):
            whole = TensorLayout.whole(len(graph.values[value].shape), ranks)
            made = whole if rule is None else strategy.makes(rule, place).summed()
            layouts[value] = rests.get(value, made)
    return tuple(out)


def _default(
    graph: OpGraph, node: OpNode, rule: OpRule | None, *, ranks: int, layouts: Mapping[int, TensorLayout]
) -> OpStrategy:
    if rule is None:
        return OpStrategy((ranks,))
    if node.kind in HEAVY:
        return data_parallel(rule, ranks)
    return follow(graph, node, rule, ranks=ranks, layouts=layouts)


def data_parallel(rule: OpRule, ranks: int) -> OpStrategy:
    """Cuts the first dim of the output (the samples) over all ranks, or over as many as divide it.

    >>> data_parallel(OpRule((("m", "k"), ("k", "n")), (("m", "n"),), (("m", 12), ("k", 4), ("n", 2))), 8)
    OpStrategy(matrix=(4, 2), axes=(('m', (0,)),))
    """
    made = rule.outs[0]
    samples = made[0] if made else ""
    if not samples:
        return OpStrategy((ranks,))
    ways = gcd(rule.size[samples], ranks)
    if ways == 1:
        return OpStrategy((ranks,))
    matrix = (ways,) if ways == ranks else (ways, ranks // ways)
    return OpStrategy(matrix, ((samples, (0,)),))


def follow(
    graph: OpGraph, node: OpNode, rule: OpRule, *, ranks: int, layouts: Mapping[int, TensorLayout]
) -> OpStrategy:
    """Cuts the operator as its largest cut input is cut, and then as the other inputs are, where possible."""
    arrive = [
        (place, layouts[value])
        for place, value in enumerate(node.ins)
        if value in layouts and any(layouts[value].dims)
    ]
    if not arrive:
        return OpStrategy((ranks,))
    arrive.sort(key=lambda a: -prod(graph.values[node.ins[a[0]]].shape))
    matrix = arrive[0][1].matrix

    # letter by letter, as far as the slices divide its size; no axis cuts two letters
    axes: dict[str, tuple[int, ...]] = {}
    for place, layout in arrive:
        if layout.matrix != matrix:
            continue
        for letter, cuts in zip(rule.ins[place], layout.dims, strict=True):
            if not letter or letter in axes:
                continue
            used = {a for some in axes.values() for a in some}
            fits = _fitting([a for a in cuts if a not in used], matrix, rule.size[letter])
            if fits:
                axes[letter] = fits
    return OpStrategy(matrix, tuple(axes.items()))


def _fitting(cuts: Sequence[int], matrix: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The longest outermost part of ``cuts`` whose slices divide ``size``."""
    out: list[int] = []
    for a in cuts:
        if size % prod(matrix[b] for b in (*out, a)):
            break
        out.append(a)
    return tuple(out)
