"""Rules of sums, norms and losses."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from launcher.extras.device_matrix.op_graph import Arg, Name, OpGraph, OpNode, Ref
from launcher.extras.device_matrix.op_rule import Letters, OpRule, OpStrategy
from launcher.extras.device_matrix.rules.elementwise import elementwise
from launcher.extras.device_matrix.rules.letters import (
    LetteredCall,
    Lettering,
    OperatorCall,
    broadcast,
    lettered,
    without,
)
from launcher.extras.device_matrix.rules.views import uncut_along
from launcher.plan.values.dtypes import WIDTH

ORD_FIRST = ("linalg_vector_norm", "norm")


def reduced(call: OperatorCall) -> tuple[int, ...]:
    """The dims that a reduction removes, or leaves with one element."""
    if call.node.kind in ORD_FIRST:
        return call.dims(2, "dim")
    if call.node.op in ("var", "std", "var_mean", "std_mean"):  # (x, unbiased)
        return tuple(range(len(call.ins[0])))
    if call.node.kind == "kthvalue":
        return (call.dim(2, "dim", -1),)
    return call.dims(1, "dim")


def _out(call: OperatorCall, letters: Letters, gone: tuple[int, ...]) -> Letters:
    """The letters of the output, in which the reduced dims have one element or are gone."""
    if len(call.outs[0]) == len(letters):
        return without(letters, *gone)
    return tuple(x for d, x in enumerate(letters) if d not in gone)


def sum_and_mean(call: OperatorCall) -> Lettering:
    """sum and mean: the mean is the sum of the means of all parts, divided by the number of parts."""
    letters, gone = lettered(len(call.ins[0])), reduced(call)
    sums = tuple(letters[d] for d in gone)
    kernel = "mean" if call.node.kind == "mean" else ""
    return LetteredCall([letters], [_out(call, letters, gone)], sums=sums, kernel=kernel)


def uncut(call: OperatorCall) -> Lettering:
    """Reductions whose reduced dims every rank needs in full."""
    if len(call.ins) != 1:
        return None
    gone = reduced(call)
    letters = without(lettered(len(call.ins[0])), *gone)
    return LetteredCall([letters], [_out(call, letters, gone)] * len(call.outs))


def logsumexp(call: OperatorCall) -> Lettering:
    letters, gone = lettered(len(call.ins[0])), reduced(call)
    inside = tuple(letters[d] for d in gone)
    return LetteredCall([letters], [_out(call, letters, gone)], inside=inside, kernel="logsumexp")


def softmax(call: OperatorCall) -> Lettering:
    """softmax and log_softmax."""
    letters = lettered(len(call.ins[0]))
    inside = (letters[call.dim(1, "dim", -1)],) if letters else ()
    return LetteredCall([letters], [letters], inside=inside, kernel="softmax")


def cosine_similarity(call: OperatorCall) -> Lettering:
    """Only tensors of equal shape have a rule."""
    if call.ins[0] != call.ins[1]:
        return None
    dim = call.dim(2, "dim", 1)
    letters = without(lettered(len(call.ins[0])), dim)
    return LetteredCall([letters, letters], [letters[:dim] + letters[dim + 1 :]])


def extreme(call: OperatorCall) -> Lettering:
    """max and min: a reduction of one tensor, or elementwise on two."""
    return elementwise(call) if len(call.ins) == 2 else uncut(call)


def half_of_last(call: OperatorCall) -> Lettering:
    """glu: the gates are the second half of a dim, which is not cut."""
    return uncut_along(call, call.dim(1, "dim", -1))


def layer_norm(call: OperatorCall) -> Lettering:
    """layer_norm and rms_norm: the last dims, those of the weight, are normalized together."""
    letters = lettered(len(call.ins[0]))
    normalized = letters[len(letters) - len(call.integers(1, "normalized_shape")) :]
    ins = [letters, *[normalized] * (len(call.ins) - 1)]
    return LetteredCall(ins, [letters], inside=normalized, kernel=call.node.kind)


def batch_norm(call: OperatorCall) -> Lettering:
    """In training, statistics of a channel are those of the full batch; running statistics need no sum."""
    letters = _channels(len(call.ins[0]))
    ins = [letters, *[("c",)] * (len(call.ins) - 1)]
    training = call.arg(3 if call.node.op.endswith(".no_stats") else 5, "training", False) is True
    inside = tuple(x for x in letters if x != "c") if training else ()
    outs = [letters, *[("c",) if len(shape) == 1 else ("",) * len(shape) for shape in call.outs[1:]]]
    return LetteredCall(ins, outs, inside=inside, kernel="batch_norm")


def _channels(dims: int) -> Letters:
    return ("n", "c", *lettered(dims - 2, "s"))[:dims]


def group_norm(call: OperatorCall) -> Lettering:
    """The batch and full groups of channels may be cut."""
    groups = call.integer(1, "num_groups", 1)
    letters = ("n", "c", *[""] * (len(call.ins[0]) - 2))
    ins: list[Letters] = [letters, *[("c",)] * (len(call.ins) - 1)]
    return LetteredCall(ins, [letters], sizes={"c": groups})


def instance_norm(call: OperatorCall) -> Lettering:
    """Normalizes each sample alone, or with running statistics; a call that updates these has no rule."""
    if call.arg(5, "use_input_stats", True) is not True:
        return batch_norm_in_evaluation(call)
    if isinstance(call.arg(3, "running_mean"), Ref):
        return None
    letters = ("n", "c", *[""] * (len(call.ins[0]) - 2))
    return LetteredCall([letters, *[("c",)] * (len(call.ins) - 1)], [letters])


def batch_norm_in_evaluation(call: OperatorCall) -> Lettering:
    letters = _channels(len(call.ins[0]))
    return LetteredCall([letters, *[("c",)] * (len(call.ins) - 1)], [letters])


NONE, MEAN = 0, 1
"""Values of torch's ``reduction``; 2 is the sum."""
REDUCTION_AT = {
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "kl_div": 2, "binary_cross_entropy": 3,
    "soft_margin_loss": 2, "binary_cross_entropy_with_logits": 4, "poisson_nll_loss": 5,
}  # fmt: skip


def pointwise(call: OperatorCall) -> Lettering:
    """Losses of elements: their mean is the sum of the means of all parts, divided by the number of parts."""
    reduction = call.integer(REDUCTION_AT[call.node.kind], "reduction", MEAN)
    shape = _broadcast_shape(call)
    letters = lettered(len(shape))
    ins = [broadcast(s, shape, letters) for s in call.ins]
    if reduction == NONE:
        return LetteredCall(ins, [letters])
    return LetteredCall(ins, [()], sums=letters, kernel="mean" if reduction == MEAN else "")


def _broadcast_shape(call: OperatorCall) -> tuple[int, ...]:
    dims = max(len(s) for s in call.ins)
    padded = [(1,) * (dims - len(s)) + s for s in call.ins]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def cross_entropy(call: OperatorCall) -> Lettering:
    return _of_classes(call, 5, meets=True)


def nll_loss(call: OperatorCall) -> Lettering:
    return _of_classes(call, 9, meets=False)


def _of_classes(call: OperatorCall, smoothing: int, meets: bool) -> Lettering:
    """Scores are [c], [n, c] or [n, c, places]; if classes are cut, a rank has the terms of its own classes.

    ``meets``: the exponentials of all classes are summed first.
    """
    shape = call.ins[0]
    reduction = call.integer(3, "reduction", MEAN)
    scores: Letters = ("n", "c", *lettered(len(shape) - 2, "s")) if len(shape) > 1 else ("c",)
    samples = tuple(x for x in scores if x != "c")
    of_probabilities = call.ins[1] == shape and meets and _floats(call)
    ins = [scores, scores if of_probabilities else samples]
    if call.has(2, "weight"):
        ins.append(("c",))

    # A mean is divided by the number of all targets that are not ignored, which takes a sum of counts.
    sums = samples if reduction != NONE else ()
    inside = samples if reduction == MEAN and not of_probabilities else ()
    sums = (*sums, "c")
    if meets or (inside and call.has(2, "weight")):
        inside = (*inside, "c")
    out = samples if reduction == NONE else ()
    return LetteredCall(ins, [out], sums=sums, inside=inside, kernel=call.node.kind)


def _floats(call: OperatorCall) -> bool:
    return "float" in call.graph.values[call.node.ins[1]].spec.dtype


HALVES = ("float16", "bfloat16")
COUNT_BYTES = WIDTH["float32"]
"""Bytes of the number of targets that are not ignored."""


@dataclass(frozen=True)
class InnerSums:
    """The bytes of each all-reduce of one forward, and of its backward."""

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()


def inner_sums(node: OpNode, graph: OpGraph, rule: OpRule, strategy: OpStrategy) -> InnerSums:
    """Returns the all-reduces that kernels of ``launcher.extras.device_matrix.run`` call on every rank."""
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
        return self.size_without(self.rule.inside)

    def size_without(self, gone: Letters) -> int:
        shape = self.strategy.takes(self.rule, 0).local_shape(self.graph.shapes(self.node)[0])
        return prod(n for n, letter in zip(shape, self.rule.ins[0], strict=True) if letter not in gone)

    def meets(self, letters: Letters) -> bool:
        """Returns true if any of these letters is cut, so that ranks have different parts."""
        return any(self.strategy.slices(letter) > 1 for letter in letters)

    def arg(self, place: int) -> Arg:
        return self.node.args[place] if len(self.node.args) > place else None


def _wide(dtype: str) -> int:
    """Bytes of an element in the dtype of the computation: float32 for half precision."""
    return WIDTH["float32" if dtype in HALVES else dtype]


def _softmax_dtype(call: _Call) -> str:
    """The dtype in which softmax is computed."""
    argument = call.arg(2)
    if call.node.kind.startswith("_"):  # half_to_float
        return "float32" if argument else call.dtype
    named = call.node.kwarg("dtype") if argument is None else argument
    return named.text.removeprefix("torch.") if isinstance(named, Name) else call.dtype


def _class_loss(call: _Call) -> InnerSums:
    """Returns the all-reduces of a loss over classes.

    If classes are cut, the all-reduces of a softmax are needed. A mean also needs the number of targets of
    all ranks, or their weights.
    """
    node, rule, graph = call.node, call.rule, call.graph
    classes: Letters = ("c",)
    samples = tuple(x for x in rule.ins[0] if x != "c")
    forward: list[int] = []
    backward: list[int] = []
    if call.meets(classes) and node.kind == "cross_entropy_loss":
        n = call.size_without(classes) * _wide(call.dtype)
        forward, backward = [n, n], [n]

    mean = call.arg(3) in (None, 1)
    weight = call.arg(2)
    probabilities = rule.ins[1] == rule.ins[0] and graph.shapes(node)[0] == graph.shapes(node)[1]
    if mean and not probabilities:
        each = WIDTH[graph.values[weight.value].spec.dtype] if isinstance(weight, Ref) else COUNT_BYTES
        over = [samples, classes] if isinstance(weight, Ref) else [samples]
        forward += [each for letters in over if call.meets(letters)]
    return InnerSums(tuple(forward), tuple(backward))
