"""Completes a recording that has one of several equal modules: copies its operators for the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.extras.device_matrix.op_graph import OpGraph, OpNode, Value, renumbered
from launcher.plan.cut.stages import covers

MARK = "clone"
"""The operator in place of a module that was left out; it takes the module's only input."""


@dataclass(frozen=True)
class _Block:
    """All operators of ``module``, from its only input ``takes`` to its only output ``makes``.

    ``params``: the names and values of its parameters.
    """

    module: str
    nodes: tuple[OpNode, ...]
    takes: int
    makes: int
    params: tuple[tuple[str, int], ...]

    def named(self, name: str, by: str) -> str:
        """Returns the name inside module ``by`` that corresponds to ``name`` inside this module."""
        return by + name.removeprefix(self.module)


def filled_in(graph: OpGraph, likes: Mapping[str, str], params: Sequence[str]) -> OpGraph | None:
    """Returns ``graph`` as if the full model had been recorded.

    ``likes`` maps each module that was left out to its equal. ``params``: the names of all parameters of the
    model, in order. Returns ``None`` if a module has more than one input or output tensor, is called more
    than once, or has buffers: then it cannot be filled in.
    """
    blocks = {name: _block(graph, name) for name in set(likes.values())}
    marked = {at: n.module for at, n in enumerate(graph.nodes) if n.module in likes}
    if sorted(marked.values()) != sorted(likes):
        return None
    filled = {}
    for at, name in marked.items():
        block = blocks[likes[name]]
        if block is None or not _fits(graph, graph.nodes[at], block):
            return None
        filled[at] = name, block
    return _Filled(graph).graph(filled, params)


def _block(graph: OpGraph, module: str) -> _Block | None:
    # its operators are consecutive, and no other operator uses its parameters
    inside = [n for n in graph.nodes if covers(module, n.module)]
    start = graph.nodes.index(inside[0]) if inside else 0
    outside = (*graph.nodes[:start], *graph.nodes[start + len(inside) :])
    params = tuple((name, v) for name, v in graph.params if covers(module, name))
    own = {v for _, v in params}
    used = {v for n in outside for v in n.ins}.union(graph.outputs, (v for _, v in graph.changes))
    if any(covers(module, n.module) for n in outside) or own & used:
        return None
    if graph.buffers.intersection(name for name, _ in params):
        return None

    # it has one input tensor and one output tensor
    made = {v for n in inside for v in n.outs}
    taken = {v for n in inside for v in n.ins} - made - own
    returned = made & used
    if len(taken) != 1 or len(returned) != 1:
        return None
    return _Block(module, tuple(inside), takes=taken.pop(), makes=returned.pop(), params=params)


def _fits(graph: OpGraph, mark: OpNode, block: _Block) -> bool:
    """Returns true if the input and output of ``mark`` are like those of ``block``."""
    ends = [graph.values[v] for v in (*mark.ins, *mark.outs)]
    return mark.op == MARK and ends == [graph.values[block.takes], graph.values[block.makes]]


class _Filled:
    """Builds a graph and numbers its values anew: parameters, inputs, then outputs of operators, in order."""

    def __init__(self, graph: OpGraph) -> None:
        self.old = graph
        self.values: list[Value] = []
        self.nodes: list[OpNode] = []

    def graph(self, filled: Mapping[int, tuple[str, _Block]], order: Sequence[str]) -> OpGraph:
        """Returns the graph with all modules.

        ``filled``: the name and the block of each module, by the place of its mark. ``order``: the names of
        all parameters in order.
        """
        old = self.old
        own = dict(old.params)
        copies = {block.named(n, name): v for name, block in filled.values() for n, v in block.params}
        places = {n: at for at, n in enumerate(dict.fromkeys((*order, *own)))}
        params = {
            n: self._add(v) for n, v in sorted({**own, **copies}.items(), key=lambda item: places[item[0]])
        }
        at = {v: params[name] for name, v in old.params} | {v: self._add(v) for v in old.inputs}

        for place, node in enumerate(old.nodes):
            if place not in filled:
                self._run([node], at)
                continue
            name, block = filled[place]
            inside = {v: params[block.named(n, name)] for n, v in block.params}
            inside[block.takes] = at[node.ins[0]]
            self._run((replace(n, module=block.named(n.module, name)) for n in block.nodes), inside)
            at[node.outs[0]] = inside[block.makes]

        return OpGraph(
            values=tuple(self.values),
            inputs=tuple(at[v] for v in old.inputs),
            params=tuple(params.items()),
            nodes=tuple(self.nodes),
            outputs=tuple(at[v] for v in old.outputs),
            buffers=old.buffers,
            changes=tuple((name, at[v]) for name, v in old.changes),
        )

    def _add(self, old: int) -> int:
        self.values.append(self.old.values[old])
        return len(self.values) - 1

    def _run(self, nodes: Iterable[OpNode], at: dict[int, int]) -> None:
        for n in nodes:
            node = renumbered(n, at.__getitem__)
            at |= {v: self._add(v) for v in n.outs}
            self.nodes.append(replace(node, outs=tuple(at[v] for v in n.outs)))
