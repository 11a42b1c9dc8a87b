"""MindSpore's files of operator strategies: the slices or layouts of each operator's tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.untrusted.files import DIMS, brief

SLICES, OUT_SLICES = "parallel_strategy_item", "parallel_out_strategy_item"
LAYOUTS, OUT_LAYOUTS = "parallel_layout_value_item", "parallel_out_layout_value_item"
RESHAPED = ("parallel_newshape_layout_value_item", "parallel_out_newshape_layout_value_item")
KEYS = "launcher.keys"
"""Our own section, which MindSpore ignores: the name or glob that each strategy was requested under."""


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
    """Whether parsed JSON is in this format."""
    return isinstance(data, dict) and "format" not in data and SLICES in data


def parse(data: Any) -> NodeStrategies:
    """Returns the strategies in parsed JSON; raises ``ValueError`` if it is not such a file."""
    root = _mapping(data, "the file")
    for part in RESHAPED:
        if root.get(part):
            raise ValueError(f"{part}: layouts of tensors in another shape are not read")
    return NodeStrategies(
        slices=_each(root, SLICES, _slices),
        out_slices=_each(root, OUT_SLICES, _slices),
        layouts=_each(root, LAYOUTS, _tensors),
        out_layouts=_each(root, OUT_LAYOUTS, _tensors),
        keys={node: str(key) for node, key in _mapping(root.get(KEYS, {}), KEYS).items()},
    )


def text(file: NodeStrategies) -> bytes:
    """Returns the file's bytes exactly as MindSpore writes them."""
    root: dict[str, Any] = {"current_stage": 0, SLICES: _items(file.slices)}
    more: dict[str, Any] = {
        OUT_SLICES: _items(file.out_slices),
        LAYOUTS: {node: _places(maps) for node, maps in file.layouts.items()},
        OUT_LAYOUTS: {node: _places(maps) for node, maps in file.out_layouts.items()},
        KEYS: dict(file.keys),
    }
    root |= {part: found for part, found in more.items() if found}
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
            out[node] = read(_mapping(row, "what it has"))
        except ValueError as error:
            raise ValueError(f"{part}: {node}: {error}") from error
    return out


def _slices(row: dict[str, Any]) -> Slices:
    stage = row.get("stage")
    if type(stage) is not int or stage < 0:
        raise ValueError(f"stage is {brief(stage)}, not a whole number")
    tensors = _list(row.get("parallel_strategy"), "parallel_strategy")
    return Slices(stage, tuple(_wholes(dims, "parallel_strategy", 1) for dims in tensors))


def _tensors(row: dict[str, Any]) -> tuple[TensorMap, ...]:
    """Returns the layouts in order of position; raises ``ValueError`` if a position is missing."""
    if {*row} != {str(i) for i in range(len(row))}:
        raise ValueError(f"layouts of {brief(sorted(row))}, not of tensors 0, 1, ...")
    return tuple(_tensor(_mapping(row[str(i)], f"layout {i}")) for i in range(len(row)))


def _tensor(row: dict[str, Any]) -> TensorMap:
    devices = _wholes(row.get("dev_matrix"), "dev_matrix", 1)
    names = tuple(_list(row.get("alias_name"), "alias_name"))
    if len(names) != len(devices) or len({*map(str, names)}) < len(names):
        raise ValueError(f"alias_name is {brief(list(names))}, not a name for each of {brief(list(devices))}")
    if row.get("interleaved_parallel"):
        raise ValueError("interleaved_parallel is not available")

    # axes are numbered from the last one
    dims = []
    for entry in _list(row.get("tensor_map"), "tensor_map"):
        axes = _wholes(entry, "tensor_map", -1)
        if axes != (-1,) and not all(0 <= axis < len(devices) for axis in axes):
            raise ValueError(f"tensor_map has {brief(entry)}: the device matrix has {len(devices)} axes")
        dims.append(() if axes == (-1,) else tuple(str(names[-1 - axis]) for axis in axes))
    return TensorMap(devices, tuple(map(str, names)), tuple(dims))


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {brief(value)}, no mapping")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > DIMS:
        raise ValueError(f"{what} is {brief(value)}, not a short list")
    return value


def _wholes(value: Any, what: str, least: int) -> tuple[int, ...]:
    found = _list(value, what)
    if not all(type(n) is int and least <= n < 1 << 31 for n in found):
        raise ValueError(f"{what} is {brief(value)}, not a list of whole numbers from {least}")
    return tuple(found)
