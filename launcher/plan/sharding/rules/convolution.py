"""Rules of convolutions and pooling: batch, input channels (terms of a sum), output channels and groups.

Spatial dims stay whole.
"""

from __future__ import annotations

from launcher.plan.sharding.op_rule import Letters
from launcher.plan.sharding.rules.matmul import ONCE
from launcher.plan.sharding.rules.operator_call import LetteredCall, OperatorCall, Said, lettered


def convolution(call: OperatorCall) -> Said:
    transposed = call.node.kind.startswith("conv_transpose")
    groups = call.integer(6, "groups", 1)
    weight = call.ins[1]
    places = ("",) * (len(weight) - 2)
    batch: Letters = ("n",) if len(call.ins[0]) == len(weight) else ()

    # each group is a separate convolution; groups are consecutive in both channel dims
    if groups > 1:
        into = out = "g"
        kernel = ("g", "")
    else:
        into, out = "i", "o"
        kernel = ("i", "o") if transposed else ("o", "i")
    ins: list[Letters] = [(*batch, into, *places), (*kernel, *places)]
    if len(call.ins) == 3:
        ins.append((out,))
    return LetteredCall(
        ins,
        [(*batch, out, *places)],
        sizes={"g": groups},
        sums=("i",) if groups == 1 else (),
        kernel=ONCE,
    )


def by_place(call: OperatorCall) -> Said:
    """Pooling and interpolation: all dims before the spatial ones may be cut."""
    kind = call.node.kind
    spatial = next(n for n in (1, 2, 3) if f"{n}d" in kind)
    lead = len(call.ins[0]) - spatial
    letters = (*lettered(lead), *[""] * spatial)
    return LetteredCall([letters], [letters] * len(call.outs))
