"""Which values of a sharded graph a gradient of the outputs comes back to."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.sharding.sharded_graph import ShardedGraph

SHAPED_LIKE = ("expand_as", "reshape_as", "type_as", "view_as")
"""Kinds of which only the first tensor has a gradient: of others the shape or dtype counts."""


@dataclass(frozen=True)
class GradientFlow:
    """``ways``: places in ``ShardedGraph.taken`` that a gradient comes back from; ``values`` it comes to.

    ``nodes``: operators whose backward runs.
    """

    ways: frozenset[int]
    values: frozenset[int]
    nodes: frozenset[int]


def gradient_flow(graph: ShardedGraph) -> GradientFlow:
    """Of all outputs. A value that trains need not be reached: nothing that leaves may hang on it."""
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
