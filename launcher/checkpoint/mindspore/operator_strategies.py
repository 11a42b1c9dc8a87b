"""MindSpore's operator strategies as those of modules, and the other way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from launcher.checkpoint.mindspore.formats.operator_json import NodeStrategies, Slices, TensorMap
from launcher.plan.operators.resolve import LINEARS, Cut, Flow, Operator, Spread
from launcher.plan.operators.strategy import DP, TP, Axes, FromFile
from launcher.plan.sharding.stage_sharding import Sharding
from launcher.plan.sharding.strategies.operator_names import main_operators
from launcher.plan.sharding.tensor_layout import TensorLayout

MAIN = (
    "MatMul", "BatchMatMul", "Dense", "Gather", "EmbeddingLookup", "Conv2D", "LayerNorm", "RmsNorm",
    "BatchNorm",
)  # fmt: skip
"""Primitives that a module is there for."""

BESIDE = ("BiasAdd", "Add", "Cast", "Reshape", "Transpose")
"""Those that follow it within its module."""

CALLED = {
    **dict.fromkeys(LINEARS, ("Dense", "MatMul")),
    "embedding": ("Embedding", "Gather"),
    "norm": ("LayerNorm", "LayerNorm"),
}
"""Cell and primitive of a kind of module."""

_NUMBER = re.compile(r"-op\d+$")


def strategies(file: NodeStrategies, setting: str, path: str) -> dict[str, FromFile]:
    """Of each module that a node is in, by its name there; those of code between modules are empty.

    Raises ``ValueError`` where several operators of a module have strategies.
    """
    scopes: dict[str, dict[str, str]] = {}
    for node in dict.fromkeys((*file.slices, *file.layouts)):
        scope, _, last = node.rpartition("/")
        scopes.setdefault(_module(scope), {})[node] = _NUMBER.sub("", last)

    out = {}
    for module, ops in scopes.items():
        around = any(other.startswith(f"{module}." if module else "") for other in scopes if other != module)
        main = _main(module, ops, around=around)
        values = {} if main is None else _row(file, main)
        key = file.keys.get(main, "") if main is not None else ", ".join(dict.fromkeys(ops.values()))
        if values or main is None:
            out[module] = FromFile(values, setting=setting, path=path, key=key, outside=True)
    return out


def _module(scope: str) -> str:
    """``Default/network-Net/layers-CellList/0-Block`` -> ``network.layers.0``."""
    parts = [part for part in scope.split("/") if part]
    return ".".join(part.rpartition("-")[0] or part for part in parts[parts[:1] == ["Default"] :])


def _main(module: str, ops: Mapping[str, str], *, around: bool) -> str | None:
    """The node that the module's strategy is; ``None`` of code that is around other modules."""
    main = [node for node, op in ops.items() if op in MAIN]
    rest = [op for node, op in ops.items() if node not in main and op not in BESIDE]
    if len(main) == 1 and not rest:
        return main[0]
    if around and not main:
        return None
    if len(ops) == 1:
        return next(iter(ops))
    named = ", ".join(dict.fromkeys(ops.values()))
    raise ValueError(f"{module}: strategies of {len(ops)} operators ({named}); a module has one here")


def _row(file: NodeStrategies, node: str) -> dict[str, Any]:
    """As ``parallel.operators`` has it; empty for a node that nothing is said of."""
    maps = (*file.layouts.get(node, ()), *file.out_layouts.get(node, ()))
    row: dict[str, Any] = {}
    if maps:
        over = dict.fromkeys((m.devices, m.names) for m in maps)
        if len(over) > 1:
            raise ValueError(f"{node}: its tensors are over {len(over)} device matrices; one is read")
        row["layout"] = {"device_matrix": list(maps[0].devices), "alias_name": list(maps[0].names)}

    # each side in layouts, else in slices
    sides = (("in", file.layouts, file.slices), ("out", file.out_layouts, file.out_slices))
    for side, layouts, slices in sides:
        if node in layouts:
            row[side] = [[list(dim) or None for dim in m.dims] for m in layouts[node]]
        elif node in slices and slices[node].tensors:
            row[side] = [list(dims) for dims in slices[node].tensors]
    return row


def of_flow(flow: Flow, dp: int, tp: int, stage_of: Callable[[str], int]) -> NodeStrategies:
    """Every operator in layouts over data-parallel ranks and ``tp``; what was left open is as it came out."""
    slices, layouts, out_layouts, keys = {}, {}, {}, {}
    for s in flow.spreads:
        o = s.operator
        node = _node(o)
        slices[node] = Slices(stage_of(o.module))
        layouts[node] = tuple(_map(axes, dp, tp) for axes in _inputs(s))
        out_layouts[node] = (_map(o.output or _activation(s.dims[1], s.gives), dp, tp),)
        if o.key != o.module:
            keys[node] = o.key
    return NodeStrategies(slices, layouts=layouts, out_layouts=out_layouts, keys=keys)


def _node(o: Operator) -> str:
    return _node_of(o.module, o.kind)


def _node_of(module: str, kind: str) -> str:
    cell, primitive = CALLED.get(kind, ("Cell", "Cell"))
    *outer, last = module.split(".")
    return "/".join(["Default", *(f"{part}-Cell" for part in outer), f"{last}-{cell}", f"{primitive}-op0"])


def _inputs(s: Spread) -> Iterable[Axes]:
    """As MindSpore's primitives take them: a table comes first, and a bias is another operator's."""
    o = s.operator
    weights = [axes for name, axes in o.weights if o.kind not in LINEARS or name == "weight"]
    x = o.input or _activation(s.dims[0], s.takes)
    return [*weights, x] if o.kind == "embedding" else [x, *weights]


def _activation(dims: int, cut: Cut) -> Axes:
    """Samples over data-parallel ranks, and a dim over ``tp``."""
    names: list[tuple[str, ...]] = [(DP,) if d == 0 else () for d in range(dims)]
    if cut is not None:
        names[cut] = (*names[cut], TP)
    return tuple(names)


def _map(axes: Axes, dp: int, tp: int) -> TensorMap:
    return TensorMap((dp, tp), (DP, TP), axes)


PRIMITIVES = {"linear": "linear", "embedding": "embedding", "layer_norm": "norm"}
"""What modules are that call these of torch's operators."""


def of_sharding(sharding: Sharding, stage_of: Callable[[int], int]) -> NodeStrategies:
    """Operators on parameters, and those that were written; ``stage_of``: of a virtual stage.

    The operator that a module is there for: code around other modules has no name of its own in this form.
    """
    slices, layouts, out_layouts, keys = {}, {}, {}, {}
    for index, stage in enumerate(sharding.stages):
        graph = stage.train
        written = {w.node: w for w in stage.written}
        modules = {n.module for n in graph.graph.nodes}
        for module, at in main_operators(graph.graph, graph.rules).items():
            rule = None if at is None else graph.rules[at]
            if at is None or rule is None or not module or any(m.startswith(f"{module}.") for m in modules):
                continue
            op, said = graph.graph.nodes[at], written.get(at)
            if said is None and not graph.params.intersection(op.ins):
                continue
            node = _node_of(module, PRIMITIVES.get(op.kind, ""))
            takes = [graph.strategies[at].takes(rule, place) for place in range(len(rule.ins))]
            slices[node] = Slices(stage_of(index))
            layouts[node] = tuple(map(_over_matrix, takes))
            if said is not None and said.out is not None:
                out_layouts[node] = (_over_matrix(said.out),)
            if said is not None and said.key != module:
                keys[node] = said.key
    return NodeStrategies(slices, layouts=layouts, out_layouts=out_layouts, keys=keys)


def _over_matrix(layout: TensorLayout) -> TensorMap:
    names = tuple(f"d{a}" for a in range(len(layout.matrix)))
    return TensorMap(layout.matrix, names, tuple(tuple(names[a] for a in dim) for dim in layout.dims))
