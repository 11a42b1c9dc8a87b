"""Finds in-place changes of memory that another pipeline stage would not see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.errors import Problem
from launcher.plan.values.model_graph import Graph, Node
from launcher.plan.values.module_names import STAGE_CONFIG


def own(graph: Graph, node: Node) -> frozenset[int]:
    """Returns the memory of the module that ``node`` calls: its parameters and buffers."""
    input_memory = frozenset[int]().union(*(graph[m].lies for m in node.inputs))
    return node.reads - input_memory if node.kind == "module" else frozenset()


def problems(graph: Graph, at: Mapping[str, int]) -> list[Problem]:
    """Returns a problem for each node whose in-place change another stage would miss or see too early.

    A value that crosses a boundary is copied when its stage is done. That is right for uses on earlier stages
    before the change, and for uses on later stages after it. Changes that modules make to the model's own
    tensors are checked by name in ``plan.refusals.model``.
    """
    order = {n.name: i for i, n in enumerate(graph.nodes)}
    kept = frozenset[int]().union(
        *(own(graph, n) for n in graph.nodes), *(n.lies for n in graph.nodes if n.kind == "param")
    )
    problems = []
    for node in graph.nodes:
        for where in sorted(node.writes - (kept if node.kind == "module" else frozenset())):
            other = next(_blind(graph, at, order, writer=node, where=where, kept=where in kept), None)
            if other is not None:
                problems.append(_problem(at, node, other))
                break
    return problems


def _blind(
    graph: Graph, at: Mapping[str, int], order: Mapping[str, int], *, writer: Node, where: int, kept: bool
) -> Iterator[Node]:
    """Yields nodes on other stages that would see a change of the memory ``where`` too early or not at all.

    ``writer`` makes the change. ``kept``: the memory belongs to the model.
    """
    mine, now = at[writer.name], order[writer.name]

    # each value that is sent to its stage is a separate copy
    received = dict.fromkeys(
        m for n in graph.nodes if n.kind != "param" and at[n.name] == mine for m in n.inputs
        if graph[m].kind != "param" and at[m] < mine and where in graph[m].lies
    )  # fmt: skip
    if len(received) > 1:
        yield graph[list(received)[1]]

    # uses on other stages are right only in the order of the stages
    for n in graph.nodes:
        if n.kind == "param" or n is writer or at[n.name] == mine or where not in n.reads | n.lies:
            continue
        before = order[n.name] < now and at[n.name] < mine
        after = order[n.name] > now and at[n.name] > mine
        if kept or not (before or after):
            yield n


def _problem(at: Mapping[str, int], writer: Node, other: Node) -> Problem:
    text = f"{writer.label} on stage {at[writer.name]} changes memory in place that {other.label} on stage"
    text = f"{text} {at[other.name]} shares, and each stage has a copy of its own"
    return Problem(STAGE_CONFIG, f"{text}; put both on one stage, or make a new tensor instead")
