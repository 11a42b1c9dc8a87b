"""The redistributions between the operators of a sharded graph, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.plan.sharding.parameters import ShardedParam
from launcher.plan.sharding.redistribution.planned import Redistribution, back, redistribution
from launcher.plan.sharding.sharded_graph import ShardedGraph, Taken
from launcher.plan.sharding.tensor_layout import TensorLayout
from launcher.plan.values.facts import WIDTH


@dataclass(frozen=True)
class Move:
    """A redistribution, and that of its gradient, if there is one. ``itemsize``: bytes per element."""

    forward: Redistribution
    backward: Redistribution | None
    itemsize: int


def taken(graph: ShardedGraph, way: Taken) -> Move | None:
    """The move of a value from its layout at rest to the layout in which an operator takes it.

    ``None`` if both layouts are the same, or for a parameter whose gradient is summed once per step.
    """
    if graph.still(way) or (way.value in graph.params and graph.summed_later(way.value)):
        return None
    return _move(graph, way.value, graph.layouts[way.value], way.layout, terms=way.terms)


def settled(graph: ShardedGraph, value: int) -> Move | None:
    """The move of a value from the layout in which an operator makes it to its layout at rest, if any."""
    if graph.made[value].canonical == graph.layouts[value].canonical:
        return None
    return _move(graph, value, graph.made[value], graph.layouts[value], terms=())


def _move(
    graph: ShardedGraph, value: int, src: TensorLayout, dst: TensorLayout, terms: tuple[int, ...]
) -> Move:
    of = graph.graph.values[value]
    size = WIDTH[of.spec.dtype]
    backward = back(src, dst, terms, of.shape, size) if of.trains else None
    return Move(redistribution(src, dst, of.shape, size), backward, size)


def moves(graph: ShardedGraph) -> Iterator[Move]:
    """Yields all moves of one forward and its backward, in no particular order."""
    for way in graph.taken:
        move = taken(graph, way)
        if move is not None:
            yield move
    for node in graph.graph.nodes:
        for value in node.outs:
            move = settled(graph, value)
            if move is not None and graph.users[value]:
                yield move


def gathered(p: ShardedParam) -> Redistribution:
    """The redistribution that gathers a sharded parameter for the operators that use it."""
    return redistribution(p.rest, p.used, p.spec.shape, WIDTH[p.spec.dtype])


def reduced(p: ShardedParam) -> Redistribution:
    """The redistribution that sums the terms of a parameter's gradient into its layout at rest."""
    return back(p.rest, p.used, p.terms, p.spec.shape, WIDTH[p.spec.dtype])
