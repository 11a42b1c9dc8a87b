"""Finds the memory that nodes of a trace share, and the inputs that get a gradient through each node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from launcher.parallel.trace.code_between_modules import Tracer, origin_of, origins, storages
from launcher.parallel.trace.tensor_specs import specs


@dataclass(frozen=True)
class GraphNodeMemory:
    """Fields of ``plan.values.model_graph.Node``; storages are numbered by first appearance."""

    reads: frozenset[int]
    lies: frozenset[int]
    writes: frozenset[int]


def memory(tracer: Tracer) -> dict[fx.Node, GraphNodeMemory]:
    """Returns the memory that each node reads, returns and writes."""
    numbers: dict[int, int] = {}

    def numbered(addresses: Iterable[int]) -> frozenset[int]:
        return frozenset(numbers.setdefault(at, len(numbers)) for at in addresses)

    out = {}
    for node in tracer.graph.nodes:
        reads = storages([tracer.values[i] for i in node.all_input_nodes])
        if node in tracer.calls:
            module = tracer.calls[node][0]
            reads |= storages([*module.parameters(), *module.buffers()])
        lies = storages(tracer.values.get(node))
        wrote = tracer.writes.get(node, frozenset())
        writes = [at for at in reads | lies if at in wrote]
        out[node] = GraphNodeMemory(numbered(reads), numbered(lies), numbered(writes))
    return out


@dataclass(frozen=True)
class GraphNodeGradients:
    """``inputs``: those that get a gradient through a node from the model's output.

    ``idle``: the tensors of its value, by their numbers, that get none from anywhere.
    """

    inputs: frozenset[str]
    idle: tuple[int, ...]


def gradients(tracer: Tracer, spaces: Mapping[fx.Node, GraphNodeMemory]) -> dict[fx.Node, GraphNodeGradients]:
    """Returns for each node where gradients from the model's output arrive.

    Autograd rewrites the history of a value that is changed in place, so every user of it counts.
    """
    # where gradients of each value arrive, and the nodes that made these functions
    origin = {}
    makers: dict[Any, list[fx.Node]] = {}
    for node in tracer.graph.nodes:
        origin[node] = tracer.origins.get(node, frozenset()) | origins(tracer.values.get(node))
        for at in origin[node]:
            makers.setdefault(at, []).append(node)

    # the gradients of the output itself
    grad_inputs: dict[fx.Node, set[str]] = {n: set() for n in tracer.graph.nodes}
    (end,) = tracer.graph.find_nodes(op="output")
    grad_inputs[end] |= {i.name for i in end.all_input_nodes if origin[i]}

    # autograd's path: each function belongs to the node that ran when it was made
    starts = [at for at, _ in tracer.spans]
    reached = set(origins(tracer.values[end]))
    stack = [at[0] for at in reached if isinstance(at, tuple)]
    seen = set(stack)
    while stack:
        function = stack.pop()
        _, user = tracer.spans[bisect_right(starts, function._sequence_nr()) - 1]
        for following, number in function.next_functions:
            leaf = hasattr(following, "variable")
            at = id(following.variable) if leaf else (following, number)
            reached.add(at)
            grad_inputs[user] |= {m.name for m in makers.get(at, ()) if m in user.all_input_nodes}
            if following is not None and not leaf and following not in seen:
                seen.add(following)
                stack.append(following)

    # values that are changed in place, and those that are only passed on
    written = frozenset[int]().union(*(m.writes for m in spaces.values()))
    for node in tracer.graph.nodes:
        grad_inputs[node] |= {i.name for i in node.all_input_nodes if origin[i] and spaces[i].lies & written}
    _passed_on(tracer.graph, origin, grad_inputs)
    return {
        n: GraphNodeGradients(
            frozenset(names), () if spaces[n].lies & written else _idle(tracer.values[n], reached)
        )
        for n, names in grad_inputs.items()
    }


def _idle(value: Any, reached: Container[Any]) -> tuple[int, ...]:
    """Returns the numbers of the tensors in ``value`` whose origin no gradient has ``reached``."""
    tensors = value if specs(value)[1] else [value] if isinstance(value, torch.Tensor) else []
    return tuple(i for i, t in enumerate(tensors) if t.requires_grad and origin_of(t) not in reached)


def _passed_on(
    graph: fx.Graph, origin: dict[fx.Node, frozenset[Any]], grad_inputs: dict[fx.Node, set[str]]
) -> None:
    """Adds inputs that a node returns, or returns a view of: they get its gradient."""
    needed = set[str]().union(*grad_inputs.values())
    for node in reversed(graph.nodes):
        if node.name in needed:
            grad_inputs[node] |= {i.name for i in node.all_input_nodes if origin[node] & origin[i]}
            needed |= grad_inputs[node]
