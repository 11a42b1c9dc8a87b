"""The rule of scaled dot-product attention: batch, heads and query positions may be cut."""

from __future__ import annotations

from launcher.plan.sharding.op_rule import Letters
from launcher.plan.sharding.rules.operator_call import (
    LetteredCall,
    OperatorCall,
    Said,
    broadcast,
    lettered,
)


def attention(call: OperatorCall) -> Said:
    """With grouped queries, the heads of keys and values are the outermost part of those of queries.

    The kernel has to know which query positions a rank has, for a causal mask.
    """
    q, k, v = call.ins[:3]
    if call.arg(4, "dropout_p", 0.0) != 0.0:
        return None
    grouped = call.node.kwarg("enable_gqa", False) is True and len(q) > 2 and q[-3] != k[-3]
    if not grouped and not q[:-2] == k[:-2] == v[:-2]:
        return None

    # Dims before the last two are cut alike in all tensors; a single head of keys and values stays whole.
    batch = lettered(len(q) - 2)
    queries = (*batch, "l", "")
    single = grouped and k[-3] == 1
    keys = (*((*batch[:-1], "") if single else batch), "", "")
    ins: list[Letters] = [queries, keys, keys]
    if len(call.ins) == 4:
        scores = (*q[:-1], k[-2])
        ins.append(broadcast(call.ins[3], scores, (*batch, "l", "")))
    return LetteredCall(ins, [queries], kernel="attention")
