"""Strategies of modules, from files of MindSpore."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.optional import matrices
from launcher.plan.tensor_parallel.module_strategies import LINEARS, Cut, Operator
from launcher.plan.tensor_parallel.sharded_operators import ShardedOperator, TensorParallelPlan
from launcher.plan.tensor_parallel.strategy_reader import DP, TP, Axes
from launcher.plan.values.resolved import Origins, StrategyOrigin
from launcher.untrusted.files import DIMS, brief

SLICES, OUT_SLICES = "parallel_strategy_item", "parallel_out_strategy_item"
LAYOUTS, OUT_LAYOUTS = "parallel_layout_value_item", "parallel_out_layout_value_item"
RESHAPED = ("parallel_newshape_layout_value_item", "parallel_out_newshape_layout_value_item")
KEYS = "launcher.keys"
"""Our own section, which MindSpore ignores: the name or glob under which each strategy was requested."""


@dataclass(frozen=True)
class Slices:
    """How many parts each dim of each tensor is cut into; empty for an operator with layouts."""

    stage: int
    tensors: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class TensorMap:
    """The layout of one tensor over the device matrix ``devices``, whose axes are called ``names``.

    ``dims`` has, for each dim, the names of the axes that cut it, outermost first.
    """

    devices: tuple[int, ...]
    names: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class NodeStrategies:
    """The strategies of a file, by the graph's name of each operator.

    Such a name is ``Default/network-Net/fc1-Dense/MatMul-op0``.
    """

    slices: Mapping[str, Slices]
    out_slices: Mapping[str, Slices] = field(default_factory=dict)
    layouts: Mapping[str, tuple[TensorMap, ...]] = field(default_factory=dict)
    out_layouts: Mapping[str, tuple[TensorMap, ...]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


def is_mindspores(data: Any) -> bool:
    """Returns true if parsed JSON is in this format."""
    return isinstance(data, dict) and "format" not in data and SLICES in data


def node_strategies(data: Any) -> NodeStrategies:
    """Returns the strategies in parsed JSON; raises ``ValueError`` if it is not such a file."""
    root = _mapping(data, "the file")
    for part in RESHAPED:
        if root.get(part):
            raise ValueError(f"{part}: layouts of reshaped tensors are not supported")
    return NodeStrategies(
        slices=_each(root, SLICES, _slices),
        out_slices=_each(root, OUT_SLICES, _slices),
        layouts=_each(root, LAYOUTS, _tensors),
        out_layouts=_each(root, OUT_LAYOUTS, _tensors),
        keys={node: str(key) for node, key in _mapping(root.get(KEYS, {}), KEYS).items()},
    )


def node_text(file: NodeStrategies) -> bytes:
    """Returns the file's bytes exactly as MindSpore writes them."""
    root: dict[str, Any] = {"current_stage": 0, SLICES: _items(file.slices)}
    more: dict[str, Any] = {
        OUT_SLICES: _items(file.out_slices),
        LAYOUTS: {node: _places(maps) for node, maps in file.layouts.items()},
        OUT_LAYOUTS: {node: _places(maps) for node, maps in file.out_layouts.items()},
        KEYS: dict(file.keys),
    }
    root |= {part: content for part, content in more.items() if content}
    return json.dumps(root, sort_keys=True, separators=(",", ":")).encode()


def _items(slices: Mapping[str, Slices]) -> dict[str, Any]:
    return {node: {"parallel_strategy": s.tensors, "stage": s.stage} for node, s in slices.items()}


def _places(maps: tuple[TensorMap, ...]) -> dict[str, Any]:
    """Returns the layouts by the position of each tensor."""
    return {str(i): _layout(m) for i, m in enumerate(maps)}


def _layout(m: TensorMap) -> dict[str, Any]:
    number = {name: len(m.names) - 1 - at for at, name in enumerate(m.names)}
    return {
        "dev_matrix": m.devices,
        "tensor_map": [[number[name] for name in dim] or [-1] for dim in m.dims],
        "interleaved_parallel": False,
        "alias_name": m.names,
    }


def _each(root: dict[str, Any], part: str, read: Any) -> dict[str, Any]:
    out = {}
    for node, row in _mapping(root.get(part, {}), part).items():
        try:
            out[node] = read(_mapping(row, "its value"))
        except ValueError as error:
            raise ValueError(f"{part}: {node}: {error}") from error
    return out


def _slices(row: dict[str, Any]) -> Slices:
    stage = row.get("stage")
    if type(stage) is not int or stage < 0:
        raise ValueError(f"stage is {brief(stage)}, not a whole number")
    tensors = _list(row.get("parallel_strategy"), "parallel_strategy")
    return Slices(stage, tuple(_integers(dims, "parallel_strategy", 1) for dims in tensors))


def _tensors(row: dict[str, Any]) -> tuple[TensorMap, ...]:
    """Returns the layouts in order of position; raises ``ValueError`` if a position is missing."""
    if {*row} != {str(i) for i in range(len(row))}:
        raise ValueError(f"layouts of tensors {brief(sorted(row))}; they must be 0, 1, ...")
    return tuple(_tensor(_mapping(row[str(i)], f"layout {i}")) for i in range(len(row)))


def _tensor(row: dict[str, Any]) -> TensorMap:
    devices = _integers(row.get("dev_matrix"), "dev_matrix", 1)
    names = tuple(_list(row.get("alias_name"), "alias_name"))
    if len(names) != len(devices) or len({*map(str, names)}) < len(names):
        text = f"alias_name is {brief(list(names))}; it must name each axis of {brief(list(devices))}"
        raise ValueError(text)
    if row.get("interleaved_parallel"):
        raise ValueError("interleaved_parallel is not available")

    # axes are numbered from the last one
    dims = []
    for entry in _list(row.get("tensor_map"), "tensor_map"):
        axes = _integers(entry, "tensor_map", -1)
        if axes != (-1,) and not all(0 <= axis < len(devices) for axis in axes):
            raise ValueError(f"tensor_map has {brief(entry)}: the device matrix has {len(devices)} axes")
        dims.append(() if axes == (-1,) else tuple(str(names[-1 - axis]) for axis in axes))
    return TensorMap(devices, tuple(map(str, names)), tuple(dims))


def _mapping(value: Any, label: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{label} is {brief(value)}, not a mapping")
    return value


def _list(value: Any, label: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > DIMS:
        raise ValueError(f"{label} is {brief(value)}, not a short list")
    return value


def _integers(value: Any, label: str, least: int) -> tuple[int, ...]:
    numbers = _list(value, label)
    if not all(type(n) is int and least <= n < 1 << 31 for n in numbers):
        raise ValueError(f"{label} is {brief(value)}, not a list of whole numbers from {least}")
    return tuple(numbers)


MAIN = (
    "MatMul", "BatchMatMul", "Dense", "Gather", "EmbeddingLookup", "Conv2D", "LayerNorm", "RmsNorm",
    "BatchNorm",
)  # fmt: skip
"""Primitives that can be the main operator of a module."""

BESIDE = ("BiasAdd", "Add", "Cast", "Reshape", "Transpose")
"""Primitives that accompany the main operator within its module."""

CALLED = {
    **dict.fromkeys(LINEARS, ("Dense", "MatMul")),
    "embedding": ("Embedding", "Gather"),
    "norm": ("LayerNorm", "LayerNorm"),
}
"""MindSpore's cell and primitive for each kind of module."""

_NUMBER = re.compile(r"-op\d+$")


def strategies(file: NodeStrategies, setting: str, path: str) -> tuple[dict[str, Any], Origins]:
    """Returns the strategies of all modules with a node in ``file``, and their origins, by name in the file.

    The strategy of a module that is only code around other modules is empty. ``setting`` and ``path`` say
    where the file was named, for messages. Raises ``ValueError`` if several operators of one module have
    strategies.
    """
    scopes: dict[str, dict[str, str]] = {}
    for node in dict.fromkeys((*file.slices, *file.layouts)):
        scope, _, last = node.rpartition("/")
        scopes.setdefault(_module(scope), {})[node] = _NUMBER.sub("", last)

    out = {}
    origins = {}
    for module, ops in scopes.items():
        around = any(other.startswith(f"{module}." if module else "") for other in scopes if other != module)
        main = _main(module, ops, around=around)
        values = {} if main is None else _row(file, main)
        key = file.keys.get(main, "") if main is not None else ", ".join(dict.fromkeys(ops.values()))
        if values or main is None:
            out[module] = values
            origins[module] = StrategyOrigin(setting, path, key=key, outside=True)
    return out, origins


def _module(scope: str) -> str:
    """Returns a scope's module: ``network.layers.0`` for ``Default/network-Net/layers-CellList/0-Block``."""
    parts = [part for part in scope.split("/") if part]
    return ".".join(part.rpartition("-")[0] or part for part in parts[parts[:1] == ["Default"] :])


def _main(module: str, ops: Mapping[str, str], *, around: bool) -> str | None:
    """Returns the node whose strategy is the module's; ``None`` if the module is code around other modules.

    ``around`` says whether other modules are inside this one. Raises ``ValueError`` if the node is ambiguous.
    """
    main = [node for node, op in ops.items() if op in MAIN]
    rest = [op for node, op in ops.items() if node not in main and op not in BESIDE]
    if len(main) == 1 and not rest:
        return main[0]
    if around and not main:
        return None
    if len(ops) == 1:
        return next(iter(ops))
    named = ", ".join(dict.fromkeys(ops.values()))
    raise ValueError(f"{module}: strategies of {len(ops)} operators ({named}); a module can have only one")


def _row(file: NodeStrategies, node: str) -> dict[str, Any]:
    """Returns the strategy of ``node`` in the form of ``parallel.operators``; empty if the file has none."""
    maps = (*file.layouts.get(node, ()), *file.out_layouts.get(node, ()))
    row: dict[str, Any] = {}
    if maps:
        over = dict.fromkeys((m.devices, m.names) for m in maps)
        if len(over) > 1:
            raise ValueError(
                f"{node}: its tensors are over {len(over)} device matrices; only one is supported"
            )
        row["layout"] = {"device_matrix": list(maps[0].devices), "alias_name": list(maps[0].names)}

    # inputs and outputs as layouts if the file has them, else as slices
    sides = (("in", file.layouts, file.slices), ("out", file.out_layouts, file.out_slices))
    for side, layouts, slices in sides:
        if node in layouts:
            row[side] = [[list(dim) or None for dim in m.dims] for m in layouts[node]]
        elif node in slices and slices[node].tensors:
            row[side] = [list(dims) for dims in slices[node].tensors]
    return row


def of_flow(flow: TensorParallelPlan, dp: int, tp: int, stage_of: Callable[[str], int]) -> NodeStrategies:
    """Returns the strategy of every operator, as layouts over ``dp`` data-parallel ranks and ``tp``.

    Inputs and outputs that the request does not set have the layouts that they were resolved to. ``stage_of``
    maps a module to its stage.
    """
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


def _inputs(s: ShardedOperator) -> Iterable[Axes]:
    """Returns the layouts of the inputs that MindSpore's primitive takes, in its order.

    An embedding's table comes first. The bias of a linear layer is left out: another primitive adds it.
    """
    o = s.operator
    weights = [axes for name, axes in o.weights if o.kind not in LINEARS or name == "weight"]
    x = o.input or _activation(s.dims[0], s.takes)
    return [*weights, x] if o.kind == "embedding" else [x, *weights]


def _activation(dims: int, cut: Cut) -> Axes:
    """Returns the layout of an activation: samples over data-parallel ranks, dim ``cut`` over ``tp``."""
    names: list[tuple[str, ...]] = [(DP,) if d == 0 else () for d in range(dims)]
    if cut is not None:
        names[cut] = (*names[cut], TP)
    return tuple(names)


def _map(axes: Axes, dp: int, tp: int) -> TensorMap:
    return TensorMap((dp, tp), (DP, TP), axes)


PRIMITIVES = {"linear": "linear", "embedding": "embedding", "layer_norm": "norm"}
"""The kind of module, a key of ``CALLED``, that each of these torch operators stands for."""


def of_sharding(sharding: matrices.Sharding, stage_of: Callable[[int], int]) -> NodeStrategies:
    """Returns the strategies of operators that read parameters, and of those that the request sets.

    Only the main operator of each module is included. Code around other modules is left out, because this
    format has no name for it. ``stage_of`` maps the index of a virtual stage to its stage.
    """
    slices, layouts, out_layouts, keys = {}, {}, {}, {}
    for index, stage in enumerate(sharding.stages):
        graph = stage.train
        written = {w.node: w for w in stage.written}
        modules = {n.module for n in graph.graph.nodes}
        for module, at in matrices.main_operators(graph.graph, graph.rules).items():
            rule = None if at is None else graph.rules[at]
            if at is None or rule is None or not module or any(m.startswith(f"{module}.") for m in modules):
                continue
            op, requested = graph.graph.nodes[at], written.get(at)
            if requested is None and not graph.params.intersection(op.ins):
                continue
            node = _node_of(module, PRIMITIVES.get(op.kind, ""))
            takes = [graph.strategies[at].takes(rule, place) for place in range(len(rule.ins))]
            slices[node] = Slices(stage_of(index))
            layouts[node] = tuple(map(_over_matrix, takes))
            if requested is not None and requested.out is not None:
                out_layouts[node] = (_over_matrix(requested.out),)
            if requested is not None and requested.key != module:
                keys[node] = requested.key
    return NodeStrategies(slices, layouts=layouts, out_layouts=out_layouts, keys=keys)


def _over_matrix(layout: matrices.TensorLayout) -> TensorMap:
    names = tuple(f"d{a}" for a in range(len(layout.matrix)))
    return TensorMap(layout.matrix, names, tuple(tuple(names[a] for a in dim) for dim in layout.dims))
