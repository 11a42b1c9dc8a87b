"""Rules of norms: over cut dims, ranks compute common statistics."""

from __future__ import annotations

from launcher.plan.sharding.op_graph import Ref
from launcher.plan.sharding.op_rule import Letters
from launcher.plan.sharding.rules.operator_call import LetteredCall, OperatorCall, Said, lettered


def layer_norm(call: OperatorCall) -> Said:
    """layer_norm and rms_norm: the last dims, those of the weight, are normalized together."""
    letters = lettered(len(call.ins[0]))
    normalized = letters[len(letters) - len(call.integers(1, "normalized_shape")) :]
    ins = [letters, *[normalized] * (len(call.ins) - 1)]
    return LetteredCall(ins, [letters], inside=normalized, kernel=call.node.kind)


def batch_norm(call: OperatorCall) -> Said:
    """In training, statistics of a channel are those of the full batch; running statistics need no sum."""
    letters = _channels(len(call.ins[0]))
    ins = [letters, *[("c",)] * (len(call.ins) - 1)]
    training = call.arg(3 if call.node.op.endswith(".no_stats") else 5, "training", False) is True
    inside = tuple(x for x in letters if x != "c") if training else ()
    outs = [letters, *[("c",) if len(shape) == 1 else ("",) * len(shape) for shape in call.outs[1:]]]
    return LetteredCall(ins, outs, inside=inside, kernel="batch_norm")


def _channels(dims: int) -> Letters:
    return ("n", "c", *lettered(dims - 2, "s"))[:dims]


def group_norm(call: OperatorCall) -> Said:
    """The batch and full groups of channels may be cut."""
    groups = call.integer(1, "num_groups", 1)
    letters = ("n", "c", *[""] * (len(call.ins[0]) - 2))
    ins: list[Letters] = [letters, *[("c",)] * (len(call.ins) - 1)]
    return LetteredCall(ins, [letters], sizes={"c": groups})


def instance_norm(call: OperatorCall) -> Said:
    """Normalizes each sample by itself, or with running statistics; one that updates these has no rule."""
    if call.arg(5, "use_input_stats", True) is not True:
        return batch_norm_of_given(call)
    if isinstance(call.arg(3, "running_mean"), Ref):
        return None
    letters = ("n", "c", *[""] * (len(call.ins[0]) - 2))
    return LetteredCall([letters, *[("c",)] * (len(call.ins) - 1)], [letters])


def batch_norm_of_given(call: OperatorCall) -> Said:
    letters = _channels(len(call.ins[0]))
    return LetteredCall([letters, *[("c",)] * (len(call.ins) - 1)], [letters])
