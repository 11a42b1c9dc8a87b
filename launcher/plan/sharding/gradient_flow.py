"""Which values of a sharded graph get a gradient from its outputs."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.sharding.sharded_graph import ShardedGraph

SHAPED_LIKE = ("expand_as", "reshape_as", "type_as", "view_as")
"""Kinds whose first tensor alone gets a gradient; of the others only the shape or dtype is used."""


@dataclass(frozen=True)
class GradientFlow:
    """The path of gradients through a sharded graph.

    ``ways``: places in ``ShardedGraph.taken`` that return a gradient. ``values``: values that get one.
    ``nodes``: operators whose backward runs.
    """

    ways: frozenset[int]
    values: frozenset[int]
    nodes: frozenset[int]


def gradient_flow(graph: ShardedGraph) -> GradientFlow:
    """Returns the flow of the gradients of all outputs.

    Not every value that requires a gradient gets one, because the outputs may not depend on it.
    """
    trains = [v.trains for v in graph.graph.values]
    ways = {way for way in graph.returns if trains[graph.taken[way].value]}
    values = {graph.taken[way].value for way in ways}
    nodes = set()
    for at in reversed(range(len(graph.graph.nodes))):
        node = graph.graph.nodes[at]
        if not any(trains[v] and v in values for v in node.outs):
            continue
        nodes.add(at)
        count = 1 if node.kind in SHAPED_LIKE else len(node.ins)
        reached = {way for way in graph.takes[at][:count] if trains[graph.taken[way].value]}
        ways |= reached
        values |= {graph.taken[way].value for way in reached}
    return GradientFlow(frozenset(ways), frozenset(values), frozenset(nodes))
