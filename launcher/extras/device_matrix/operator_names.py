"""Names of operators, and the operator of a module to which the module's strategy applies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.op_rule import OpRule

MARK = ":"
"""Separates a module from one of its operators: ``attn:softmax``, ``attn:add:2`` for the second of a kind."""


def operator_names(graphs: Sequence[OpGraph]) -> list[tuple[str, ...]]:
    """Returns the names of the operators of each stage. Several stages may have code of one module."""
    seen: Counter[tuple[str, str]] = Counter()
    out = []
    for graph in graphs:
        names = []
        for n in graph.nodes:
            seen[n.module, n.kind] += 1
            nth = seen[n.module, n.kind]
            names.append(f"{n.module}{MARK}{n.kind}" + (f"{MARK}{nth}" if nth > 1 else ""))
        out.append(tuple(names))
    return out


def main_operators(graph: OpGraph, rules: Sequence[OpRule | None]) -> dict[str, int | None]:
    """Returns for each module the operator to which its strategy applies; ``None`` if no operator can be cut.

    It is the operator with the largest inputs among those that take parameters, or else the first one.
    """
    params = {value for _, value in graph.params}
    mine: dict[str, list[int]] = {}
    for at, n in enumerate(graph.nodes):
        cut = mine.setdefault(n.module, [])
        if rules[at] is not None:
            cut.append(at)

    def size(at: int) -> int:
        return sum(map(prod, graph.shapes(graph.nodes[at])))

    out = {}
    for module, places in mine.items():
        own = [at for at in places if params.intersection(graph.nodes[at].ins)]
        out[module] = max(own, key=lambda at: (size(at), -at)) if own else next(iter(places), None)
    return out
