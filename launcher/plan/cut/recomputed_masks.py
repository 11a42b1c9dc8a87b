"""Masks and positions that every stage computes from the inputs, instead of receiving them."""

from __future__ import annotations

from launcher.plan.values.model_graph import Graph, Node

EXACT = frozenset({
    "unsqueeze", "squeeze", "getitem", "expand", "expand_as", "eq", "ne", "lt", "le", "gt", "ge", "and", "or",
    "invert", "logical_and", "logical_or", "logical_not", "tril", "triu", "sum", "cumsum", "add", "sub",
    "bool", "int", "long",
})  # fmt: skip
"""Functions, by name without underscores, that return the same integers on every device."""


def masks(graph: Graph) -> frozenset[str]:
    """Returns values that are cheaper to compute again from the model's inputs than to send.

    An example is a mask of shape (time, time) from an input of shape (time).
    """
    changed = frozenset[int]().union(*(n.writes for n in graph.nodes))
    made: dict[str, frozenset[str]] = {}  # the inputs from which each value is computed
    for node in graph.nodes:
        if node.kind == "input":
            made[node.name] = frozenset({node.name})
        elif node.kind == "glue" and _exact(node, changed) and all(m in made for m in node.inputs):
            made[node.name] = frozenset[str]().union(*(made[m] for m in node.inputs))
    return frozenset(
        name
        for name, inputs in made.items()
        if graph[name].kind == "glue"
        and inputs
        and _nbytes(graph[name]) >= sum(_nbytes(graph[i]) for i in inputs)
    )


def _exact(node: Node, changed: frozenset[int]) -> bool:
    """Returns true if ``node`` is exact: it returns integers, in memory that nothing writes to."""
    integers = node.out is not None and all(
        not t.dtype.startswith(("float", "bfloat", "complex")) for t in node.out
    )
    return integers and node.target.strip("_") in EXACT and not (node.reads | node.lies) & changed


def _nbytes(node: Node) -> int:
    return sum(t.nbytes for t in node.out or ())
