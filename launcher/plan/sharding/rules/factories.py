"""Rules of operators that create tensors or draw random numbers."""

from __future__ import annotations

from launcher.plan.sharding.rules.operator_call import LetteredCall, OperatorCall, Said, lettered, whole


def filled(call: OperatorCall) -> Said:
    """zeros, ones, full: each rank makes its own part; new_zeros(x) uses nothing of x but its dtype."""
    ins = [lettered(len(shape), f"x{i}_") for i, shape in enumerate(call.ins)]
    return LetteredCall(ins, [lettered(len(call.outs[0]))])


def counted(call: OperatorCall) -> Said:
    """arange, eye, rand and such: small tensors, so every rank makes the full tensor."""
    return LetteredCall(whole(call.ins), whole(call.outs))


def drawn(call: OperatorCall) -> Said:
    """Every rank draws the full tensor, whose numbers depend only on its shape, and uses its part."""
    if call.node.op not in (
        "bernoulli.p",
        "rand_like",
        "randn_like",
        "randint_like",
        "randint_like.low_dtype",
    ):
        return None
    letters = lettered(len(call.ins[0]))
    return LetteredCall([letters], [letters], kernel="drawn")


def feature_dropout(call: OperatorCall) -> Said:
    """There is one draw for each channel of each sample."""
    if len(call.ins[0]) < 2:
        return None
    letters = lettered(len(call.ins[0]))
    return LetteredCall([letters], [letters], kernel="feature_dropout")


def dropout(call: OperatorCall) -> Said:
    """Every rank draws the mask of the full tensor and uses its part of it."""
    letters = lettered(len(call.ins[0]))
    return LetteredCall([letters], [letters] * len(call.outs), kernel="dropout")
