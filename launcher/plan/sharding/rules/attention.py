"""Scaled dot-product attention: batch, heads, positions of queries."""

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
    """Heads of grouped keys and values are the outermost part of those of queries.

    Under a causal mask a rank must know which queries it has.
    """
    q, k, v = call.ins[:3]
    if call.arg(4, "dropout_p", 0.0) != 0.0:
        return None
    grouped = call.node.kwarg("enable_gqa", False) is True and len(q) > 2 and q[-3] != k[-3]
    if not grouped and not q[:-2] == k[:-2] == v[:-2]:
        return None

    # Every dim before the last two is cut alike in all of them; the single head of all queries is whole.
    batch = lettered(len(q) - 2)
    queries = (*batch, "l", "")
    single = grouped and k[-3] == 1
    keys = (*((*batch[:-1], "") if single else batch), "", "")
    ins: list[Letters] = [queries, keys, keys]
    if len(call.ins) == 4:
        scores = (*q[:-1], k[-2])
        ins.append(broadcast(call.ins[3], scores, (*batch, "l", "")))
    return LetteredCall(ins, [queries], kernel="attention")
