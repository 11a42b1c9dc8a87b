"""Rules of reductions: sums and means make terms over cut dims; others need their dims whole."""

from __future__ import annotations

from launcher.plan.sharding.op_rule import Letters
from launcher.plan.sharding.rules.elementwise import elementwise
from launcher.plan.sharding.rules.operator_call import LetteredCall, OperatorCall, Said, lettered, without
from launcher.plan.sharding.rules.views import whole_along

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


def added(call: OperatorCall) -> Said:
    """sum and mean: the mean is the sum of the means of all parts, divided by the number of parts."""
    letters, gone = lettered(len(call.ins[0])), reduced(call)
    sums = tuple(letters[d] for d in gone)
    kernel = "mean" if call.node.kind == "mean" else ""
    return LetteredCall([letters], [_out(call, letters, gone)], sums=sums, kernel=kernel)


def uncut(call: OperatorCall) -> Said:
    """Reductions whose reduced dims every rank needs whole."""
    if len(call.ins) != 1:
        return None
    gone = reduced(call)
    letters = without(lettered(len(call.ins[0])), *gone)
    return LetteredCall([letters], [_out(call, letters, gone)] * len(call.outs))


def logsumexp(call: OperatorCall) -> Said:
    letters, gone = lettered(len(call.ins[0])), reduced(call)
    inside = tuple(letters[d] for d in gone)
    return LetteredCall([letters], [_out(call, letters, gone)], inside=inside, kernel="logsumexp")


def softmax(call: OperatorCall) -> Said:
    """softmax and log_softmax."""
    letters = lettered(len(call.ins[0]))
    inside = (letters[call.dim(1, "dim", -1)],) if letters else ()
    return LetteredCall([letters], [letters], inside=inside, kernel="softmax")


def cosine_similarity(call: OperatorCall) -> Said:
    """Only tensors of equal shape have a rule."""
    if call.ins[0] != call.ins[1]:
        return None
    dim = call.dim(2, "dim", 1)
    letters = without(lettered(len(call.ins[0])), dim)
    return LetteredCall([letters, letters], [letters[:dim] + letters[dim + 1 :]])


def extreme(call: OperatorCall) -> Said:
    """max and min: a reduction of one tensor, or elementwise on two."""
    return elementwise(call) if len(call.ins) == 2 else uncut(call)


def half_of_last(call: OperatorCall) -> Said:
    """glu: the gates are the second half of a dim, which stays whole."""
    return whole_along(call, call.dim(1, "dim", -1))
