"""Writes into tensors that are seen through other tensors: what a graph of values does not say."""

from __future__ import annotations

from launcher.plan.sharding.op_graph import OpGraph, OpNode, Ref

VIEWS = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze view_as reshape_as ravel atleast_1d atleast_2d atleast_3d "
    "permute transpose swapaxes swapdims t mT mH adjoint numpy_T movedim moveaxis expand broadcast_to expand_as "
    "broadcast_tensors slice narrow select unbind split split_with_sizes chunk tensor_split diagonal detach alias "
    "contiguous to type_as real imag view_as_real view_as_complex lift_fresh positive resolve_conj resolve_neg "
    "meshgrid hsplit vsplit dsplit unfold dropout".split()
)
"""Kinds that may give memory of what they take; dropout does in evaluation."""


def in_place(kind: str) -> bool:
    """Whether an operator of this kind writes into its first tensor: ``relu_``, but not ``__and__``."""
    return kind.endswith("_") and not kind.endswith("__")


def state_values(graph: OpGraph) -> frozenset[int]:
    """Values that are a parameter or buffer itself, also after operators that wrote into it."""
    state = {value for _, value in graph.params}
    for node in graph.nodes:
        if in_place(node.kind) and node.ins and node.ins[0] in state:
            state.update(node.outs[:1])
    return frozenset(state)


def seen_elsewhere(graph: OpGraph) -> tuple[OpNode, ...]:
    """Nodes that write into memory which a later node sees through a tensor made before, or a buffer has.

    Their result alone does not carry such a write on. Kinds that may share memory count as sharing it.
    """
    state = state_values(graph)
    memory = {value: value for value in (*graph.inputs, *(v for _, v in graph.params))}
    made_at: dict[int, int] = dict.fromkeys(memory, -1)
    used_last: dict[int, int] = dict.fromkeys(graph.outputs, len(graph.nodes))
    for at, node in enumerate(graph.nodes):
        shares = in_place(node.kind) or node.kind.removesuffix("_") in VIEWS
        first = next((a.value for a in node.args if isinstance(a, Ref)), None)
        for out in node.outs:
            memory[out] = memory[first] if shares and first is not None else out
            made_at[out] = at
        for value in node.ins:
            used_last[value] = max(at, used_last.get(value, -1))

    sharing: dict[int, list[int]] = {}
    for value, base in memory.items():
        sharing.setdefault(base, []).append(value)

    found = []
    for at, node in enumerate(graph.nodes):
        if not in_place(node.kind) or not node.ins or node.ins[0] in state:
            continue
        base = memory[node.ins[0]]
        before = (v for v in sharing[base] if made_at[v] < at)
        if base in state or any(used_last.get(v, -1) > at for v in before):
            found.append(node)
    return tuple(found)
