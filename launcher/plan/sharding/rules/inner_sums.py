"""The all-reduces inside of operators that are cut along ``OpRule.inside``, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from launcher.plan.sharding.op_graph import Arg, Name, OpGraph, OpNode, Ref
from launcher.plan.sharding.op_rule import Letters, OpRule, OpStrategy
from launcher.plan.values.facts import WIDTH

HALVES = ("float16", "bfloat16")
COUNT = WIDTH["float32"]
"""Bytes of the number of targets that are not ignored."""


@dataclass(frozen=True)
class InnerSums:
    """The bytes of each all-reduce of one forward, and of its backward."""

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()


def inner_sums(node: OpNode, graph: OpGraph, rule: OpRule, strategy: OpStrategy) -> InnerSums:
    """Returns the all-reduces that kernels of ``launcher.parallel.sharding.kernels`` call on every rank."""
    call = _Call(node, graph, rule, strategy)
    match rule.kernel:
        case "softmax" if call.meets(rule.inside):
            n = call.row * _wide(_softmax_dtype(call))
            return InnerSums((n, n), (n,))  # maximum and sum; the sum of gradients
        case "logsumexp" if call.meets(rule.inside):
            n = call.row * WIDTH[call.dtype]
            return InnerSums((n, n))
        case "layer_norm" | "batch_norm" if call.meets(rule.inside):
            n = call.row * _wide(call.dtype)
            return InnerSums((n, n), (2 * n,))  # mean and variance; both gradients at once
        case "rms_norm" if call.meets(rule.inside):
            n = call.row * _wide(call.dtype)
            return InnerSums((n,), (n,))
        case "cross_entropy_loss" | "nll_loss" | "nll_loss_nd" | "nll_loss2d":
            return _class_loss(call)
        case _:
            return InnerSums()


@dataclass(frozen=True)
class _Call:
    node: OpNode
    graph: OpGraph
    rule: OpRule
    strategy: OpStrategy

    @property
    def dtype(self) -> str:
        return self.graph.values[self.node.ins[0]].spec.dtype

    @property
    def row(self) -> int:
        """The elements of a rank's part of the first tensor, without the dims that are reduced."""
        return self.left(self.rule.inside)

    def left(self, gone: Letters) -> int:
        shape = self.strategy.takes(self.rule, 0).local_shape(self.graph.shapes(self.node)[0])
        return prod(n for n, letter in zip(shape, self.rule.ins[0], strict=True) if letter not in gone)

    def meets(self, letters: Letters) -> bool:
        """Whether any of these letters is cut, so that ranks have different parts."""
        return any(self.strategy.slices(letter) > 1 for letter in letters)

    def arg(self, place: int) -> Arg:
        return self.node.args[place] if len(self.node.args) > place else None


def _wide(dtype: str) -> int:
    """Bytes of an element in the dtype of the computation: float32 for half precision."""
    return WIDTH["float32" if dtype in HALVES else dtype]


def _softmax_dtype(call: _Call) -> str:
    """The dtype in which softmax is computed."""
    given = call.arg(2)
    if call.node.kind.startswith("_"):  # half_to_float
        return "float32" if given else call.dtype
    named = call.node.kwarg("dtype") if given is None else given
    return named.text.removeprefix("torch.") if isinstance(named, Name) else call.dtype


def _class_loss(call: _Call) -> InnerSums:
    """Returns the all-reduces of a loss over classes.

    Cut classes need those of a softmax. A mean needs the number of targets of all ranks, or their weights.
    """
    node, rule, graph = call.node, call.rule, call.graph
    classes: Letters = ("c",)
    samples = tuple(x for x in rule.ins[0] if x != "c")
    forward: list[int] = []
    backward: list[int] = []
    if call.meets(classes) and node.kind == "cross_entropy_loss":
        n = call.left(classes) * _wide(call.dtype)
        forward, backward = [n, n], [n]

    mean = call.arg(3) in (None, 1)
    weight = call.arg(2)
    probabilities = rule.ins[1] == rule.ins[0] and graph.shapes(node)[0] == graph.shapes(node)[1]
    if mean and not probabilities:
        each = WIDTH[graph.values[weight.value].spec.dtype] if isinstance(weight, Ref) else COUNT
        over = [samples, classes] if isinstance(weight, Ref) else [samples]
        forward += [each for letters in over if call.meets(letters)]
    return InnerSums(tuple(forward), tuple(backward))
