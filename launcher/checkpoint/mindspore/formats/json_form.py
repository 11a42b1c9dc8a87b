"""Reads and writes strategy files in MindSpore's JSON format."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

from launcher.checkpoint.mindspore.formats.multi_axis import expanded
from launcher.checkpoint.mindspore.formats.strategy import Operator, Slicing, StrategyFile
from launcher.untrusted.files import DIMS, brief, parsed


def parse(data: bytes) -> StrategyFile:
    root = _mapping(_load(data), "the file")
    counter = _whole(root, "current_stage")
    operators = _mapping(root.get("parallel_strategy_item", {}), "parallel_strategy_item")
    found = tuple(_operator(name, row) for name, row in operators.items())
    layouts = _mapping(root.get("parallel_layout_item", {}), "parallel_layout_item")
    return StrategyFile(counter, found, {name: _slicing(name, row) for name, row in layouts.items()})


def text(file: StrategyFile) -> bytes:
    """Returns the file's bytes exactly as MindSpore writes them: sorted and compact unless merged.

    A dim that several axes cut becomes one dim per axis. Raises ``ValueError`` for a layout without a shape.
    """
    layouts = {name: _row(name, s) for name, s in file.layouts.items()}
    items = {op.name: {"parallel_strategy": op.inputs, "stage": op.stage} for op in file.operators}
    root = {"current_stage": file.counter, "parallel_strategy_item": items, "parallel_layout_item": layouts}
    merged = {} if file.merged else {"sort_keys": True, "separators": (",", ":")}
    return json.dumps(root, **merged).encode()  # type: ignore[arg-type]


def _row(name: str, s: Slicing) -> dict[str, Any]:
    if s.shape is None:
        raise ValueError(
            f"{name}: the JSON form needs the tensor's shape, the protobuf form does not have it"
        )

    s = expanded(s)
    row: dict[str, Any] = {
        "dev_matrix": s.devices,
        "field": s.field,
        "indices_offset": s.offsets,
        "opt_weight_shard_size": s.shard_size,
        "opt_weight_shard_step": s.shard_step,
        "param_split_shape": s.split_shape,
        "tensor_map": [dim[0] if dim else -1 for dim in s.dims],
        "tensor_shape": s.shape,
    }
    optional = {"indices_offset", "param_split_shape"}
    return {key: value for key, value in row.items() if value or key not in optional}


def _load(data: bytes) -> Any:
    try:
        return parsed(data, unique=True, finite=True)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError("no JSON") from error


def _operator(name: str, row: Any) -> Operator:
    row = _mapping(row, name)
    inputs = row.get("parallel_strategy", [])
    if not isinstance(inputs, list):
        raise ValueError(f"{name}: parallel_strategy is no list")
    stage = _whole(row, "stage")
    if stage < 0:
        raise ValueError(f"{name}: stage {stage}")
    cuts = tuple(_wholes({"parallel_strategy": dims}, "parallel_strategy") for dims in inputs)
    return Operator(name, stage, cuts)


def _slicing(name: str, row: Any) -> Slicing:
    row = _mapping(row, name)
    try:
        return Slicing(
            devices=_wholes(row, "dev_matrix"),
            dims=tuple(() if n == -1 else (n,) for n in _wholes(row, "tensor_map")),
            shard_size=_whole(row, "opt_weight_shard_size"),
            shard_step=_whole(row, "opt_weight_shard_step"),
            field=_whole(row, "field"),
            split_shape=_wholes({"param_split_shape": []} | row, "param_split_shape"),
            offsets=_wholes({"indices_offset": []} | row, "indices_offset"),
            shape=_shape(row) if "tensor_shape" in row else None,
        )
    except ValueError as error:
        raise ValueError(f"parameter {name}: {error}") from error


def _shape(row: dict[str, Any]) -> tuple[int, ...]:
    shape = _wholes(row, "tensor_shape")
    if any(n < 0 for n in shape):
        raise ValueError(f"tensor_shape is {list(shape)}")
    return shape


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no mapping")
    return value


def _whole(row: dict[str, Any], key: str) -> int:
    value = row.get(key)
    if type(value) is not int or abs(value) >= 1 << 63:
        raise ValueError(f"{key} is {brief(value)}, not a whole number")
    return value


def _short(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and len(value) <= DIMS


def _wholes(row: dict[str, Any], key: str) -> tuple[int, ...]:
    value = row.get(key)
    if not _short(value) or not all(type(n) is int and abs(n) < 1 << 63 for n in value):
        raise ValueError(f"{key} is {brief(value)}, not a list of whole numbers")
    return tuple(value)
