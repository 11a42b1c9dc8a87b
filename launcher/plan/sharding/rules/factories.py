"""Tensors made of nothing, and drawn at random."""

from __future__ import annotations

from launcher.plan.sharding.rules.operator_call import LetteredCall, OperatorCall, Said, lettered, whole


def filled(call: OperatorCall) -> Said:
    """zeros, ones, full: each rank makes its part; of new_zeros(x) nothing but the dtype of x counts."""
    ins = [lettered(len(shape), f"x{i}_") for i, shape in enumerate(call.ins)]
    return LetteredCall(ins, [lettered(len(call.outs[0]))])


def counted(call: OperatorCall) -> Said:
    """arange, eye and such, and what is drawn from nothing: small, so whole on every rank."""
    return LetteredCall(whole(call.ins), whole(call.outs))


def dropout(call: OperatorCall) -> Said:
    """Every rank draws the mask of the whole tensor and uses its part of it."""
    letters = lettered(len(call.ins[0]))
    return LetteredCall([letters], [letters] * len(call.outs), kernel="dropout")
