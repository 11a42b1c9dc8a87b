"""The cost of modules that torch compiles: kernels are fused, and what is recomputed is not saved."""

from __future__ import annotations

from dataclasses import replace

from launcher.plan.cost.cut_model import CutModel
from launcher.plan.partition.stages import covers
from launcher.plan.values.compilation import STAGE, Compilation
from launcher.plan.values.facts import Compiled, Graph, Node, Segment
from launcher.plan.values.operations import total


def joined(model: CutModel, plan: Compilation | None) -> CutModel:
    """Returns ``model`` with its compilation; if kernels are fused, compiled modules get their new costs.

    A node or segment that merely contains compiled modules keeps its eager costs.
    """
    graphs = model.graphs
    if plan is not None and plan.joins:
        graphs = tuple(_compiled(g, plan.modules) for g in graphs)
    return replace(model, graphs=graphs, compilation=plan)


def _compiled(graph: Graph, modules: tuple[str, ...]) -> Graph:
    nodes = [_node(n, n.backward.compiled) if _inside(n.target, modules, n) else n for n in graph.nodes]
    if not graph.segments:
        return replace(graph, nodes=tuple(nodes))

    # an untraced model is one node; its segments say what is compiled
    less = [s.backward.compiled for s in graph.segments if s.module and _covered(s.module, modules)]
    spared = Compiled(
        total(c.forward for c in less), total(c.backward for c in less), sum(c.saved for c in less)
    )
    nodes = [_node(n, spared) if n.kind == "module" else n for n in graph.nodes]
    segments = [_segment(s) if s.module and _covered(s.module, modules) else s for s in graph.segments]
    return replace(graph, nodes=tuple(nodes), segments=tuple(segments))


def _inside(target: str, modules: tuple[str, ...], node: Node) -> bool:
    return node.kind == "module" and _covered(target, modules)


def _covered(module: str, modules: tuple[str, ...]) -> bool:
    return modules == (STAGE,) or any(covers(m, module) for m in modules)


def _node(node: Node, spared: Compiled) -> Node:
    backward = replace(node.backward, operations=node.backward.operations - spared.backward)
    return replace(
        node,
        saved=max(0, node.saved - spared.saved),
        operations=node.operations - spared.forward,
        backward=backward,
    )


def _segment(segment: Segment) -> Segment:
    spared = segment.backward.compiled
    backward = replace(segment.backward, operations=segment.backward.operations - spared.backward)
    return replace(segment, saved=max(0, segment.saved - spared.saved), backward=backward)
