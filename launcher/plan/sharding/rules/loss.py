"""Rules of losses: over a cut batch, and over cut classes, each rank has a term of the loss."""

from __future__ import annotations

from launcher.plan.sharding.op_rule import Letters
from launcher.plan.sharding.rules.operator_call import (
    LetteredCall,
    OperatorCall,
    Said,
    broadcast,
    lettered,
)

NONE, MEAN = 0, 1
"""Values of torch's ``reduction``; 2 is the sum."""
REDUCTION_AT = {
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "kl_div": 2, "binary_cross_entropy": 3,
    "soft_margin_loss": 2, "binary_cross_entropy_with_logits": 4, "poisson_nll_loss": 5,
}  # fmt: skip


def pointwise(call: OperatorCall) -> Said:
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


def cross_entropy(call: OperatorCall) -> Said:
    return _of_classes(call, 5, meets=True)


def nll_loss(call: OperatorCall) -> Said:
    return _of_classes(call, 9, meets=False)


def _of_classes(call: OperatorCall, smoothing: int, meets: bool) -> Said:
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
