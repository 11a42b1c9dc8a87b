"""Shortens a graph with many equal layers: one layer counts for all that are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from launcher.extras.device_matrix.op_graph import OpGraph, renumbered

LEAST = 5
"""The fewest equal layers that are worth shortening."""
NUMBERED = re.compile(r"((?:[^.]*\.)*?)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Shortened:
    """A shortened graph.

    ``weights``: for each operator of ``graph``, the number of operators of the full graph that it counts for.
    ``of``: for each operator of the full graph, the place in ``graph`` of the one that represents it.
    """

    graph: OpGraph
    weights: tuple[int, ...]
    of: tuple[int, ...]


@dataclass(frozen=True)
class _Layer:
    """The nodes from ``start`` up to, not including, ``stop``: those of module ``prefix`` + ``number``."""

    prefix: str
    number: int
    start: int
    stop: int


def shortened(graph: OpGraph, signatures: Sequence[int]) -> Shortened:
    """Keeps the first two layers and the last one of each run of equal layers.

    ``signatures``: a number for each node, the same for equal operators. A layer is a numbered module. It is
    equal to the layer before if it runs the same operators on its own values, on the values of the layer
    before, on its own parameters, and on the same other values.
    """
    kept = list(range(len(graph.nodes)))
    weights = [1] * len(graph.nodes)
    of = list(kept)
    swap: dict[int, int] = {}
    for run in _runs(graph, signatures):
        counts, last = run[1], run[-1]
        left_out = run[2:-1]
        made = {v for layer in left_out for node in graph.nodes[layer.start : layer.stop] for v in node.outs}
        if _seen_elsewhere(graph, made, range(run[2].start, last.stop)):
            continue
        for layer in left_out:
            for n in range(layer.start, layer.stop):
                of[n] = counts.start + n - layer.start
        for n in range(counts.start, counts.stop):
            weights[n] = 1 + len(left_out)
        before = run[-2]
        for n in range(before.start, before.stop):
            pairs = zip(graph.nodes[n].outs, graph.nodes[counts.start + n - before.start].outs, strict=True)
            swap.update(pairs)
        gone = range(left_out[0].start, left_out[-1].stop)
        kept = [n for n in kept if n not in gone]

    place = {n: i for i, n in enumerate(kept)}
    nodes = (graph.nodes[n] for n in kept)
    swapped = tuple(
        n if swap.keys().isdisjoint(n.ins) else renumbered(n, lambda v: swap.get(v, v)) for n in nodes
    )
    return Shortened(
        replace(graph, nodes=swapped), tuple(weights[n] for n in kept), tuple(place[n] for n in of)
    )


def _runs(graph: OpGraph, signatures: Sequence[int]) -> list[list[_Layer]]:
    """Returns the runs of at least ``LEAST`` consecutive equal layers."""
    out: list[list[_Layer]] = []
    patterns: list[object] = []
    before: _Layer | None = None
    maker = {v: (at, i) for at, node in enumerate(graph.nodes) for i, v in enumerate(node.outs)}
    names = {v: name for name, v in graph.params}
    for layer in _layers(graph):
        pattern = _pattern(graph, layer, before, signatures, (maker, names))
        beside = before is not None and (layer.prefix, layer.number, layer.start) == (
            before.prefix,
            before.number + 1,
            before.stop,
        )
        if beside and pattern == patterns[-1]:
            out[-1].append(layer)
        else:
            out.append([layer])
        patterns.append(pattern)
        before = layer
    return [run for run in out if len(run) >= LEAST]


def _layers(graph: OpGraph) -> list[_Layer]:
    out = []
    at = 0
    for name, group in groupby(graph.nodes, key=lambda node: _numbered(node.module)):
        stop = at + len(list(group))
        if name is not None:
            out.append(_Layer(name[0], name[1], at, stop))
        at = stop
    return out


def unnumbered(module: str) -> str:
    """Returns the name with ``*`` for each number, which all layers of a stack have in common."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module)


def unnamed(graph: OpGraph) -> OpGraph:
    """Returns ``graph`` without names: stages of equal layers have equal graphs then.

    Numbers in module names count only by their difference from the first such number.
    """
    first: dict[str, list[int]] = {}
    nodes = []
    for n in graph.nodes:
        name, numbers = unnumbered(n.module), [int(x) for x in n.module.split(".") if x.isdecimal()]
        steps = [a - b for a, b in zip(numbers, first.setdefault(name, numbers), strict=True)]
        nodes.append(replace(n, module=f"{name} {steps}"))
    places = dict(graph.params)
    return replace(
        graph,
        params=tuple(("buffer" if name in graph.buffers else "", v) for name, v in graph.params),
        nodes=tuple(nodes),
        buffers=frozenset(),
        changes=tuple((str(places[name]), v) for name, v in graph.changes),
    )


def _numbered(module: str) -> tuple[str, int] | None:
    """Returns the name up to its first number, and this number.

    >>> _numbered("model.layers.12.attn.q")
    ('model.layers.', 12)
    """
    match = NUMBERED.match(module)
    return None if match is None else (match[1], int(match[2]))


def _pattern(
    graph: OpGraph,
    layer: _Layer,
    before: _Layer | None,
    signatures: Sequence[int],
    known: tuple[Mapping[int, tuple[int, int]], Mapping[int, str]],
) -> object:
    """Describes what a layer does in a form that is the same for equal layers."""
    maker, names = known
    own = f"{layer.prefix}{layer.number}."

    def describe(v: int) -> object:
        at, i = maker.get(v, (-1, 0))
        if layer.start <= at < layer.stop:
            return "own", at - layer.start, i
        if before is not None and before.start <= at < before.stop:
            return "before", at - before.start, i
        name = names.get(v, "")
        return ("parameter", name.removeprefix(own)) if name.startswith(own) else ("other", v)

    return tuple(
        (signatures[n], tuple(describe(v) for v in graph.nodes[n].ins))
        for n in range(layer.start, layer.stop)
    )


def _seen_elsewhere(graph: OpGraph, values: set[int], inside: range) -> bool:
    """Returns true if ``values`` are used by nodes not ``inside``, or by the outputs of the graph."""
    takes = {v for at, node in enumerate(graph.nodes) if at not in inside for v in node.ins}
    return not values.isdisjoint(takes | set(graph.outputs) | {v for _, v in graph.changes})
