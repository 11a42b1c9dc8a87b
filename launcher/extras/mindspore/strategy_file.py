"""Reads and writes MindSpore's strategy files, and reads its group files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from launcher.checkpoint.tensorfile.disk import write_bytes
from launcher.extras.mindspore import protobuf
from launcher.extras.mindspore.match_strategy_dims import expanded
from launcher.extras.mindspore.protobuf import BYTES, MOST_FIELDS, NUMBERS, ProtobufMessage, numbers, packet
from launcher.extras.mindspore.strategy import OperatorParts, Slicing, StrategyFile, StrategyForm
from launcher.untrusted.files import DIMS, brief, parsed, read_bytes


def parse_json(data: bytes) -> StrategyFile:
    root = _mapping(_load(data), "the file")
    counter = _integer(root, "current_stage")
    operators = _mapping(root.get("parallel_strategy_item", {}), "parallel_strategy_item")
    strategies = tuple(_operator(name, row) for name, row in operators.items())
    layouts = _mapping(root.get("parallel_layout_item", {}), "parallel_layout_item")
    return StrategyFile(counter, strategies, {name: _slicing(name, row) for name, row in layouts.items()})


def json_text(file: StrategyFile) -> bytes:
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
        raise ValueError(f"{name}: the JSON form needs the tensor's shape, which the protobuf form omits")

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
        raise ValueError("not JSON") from error


def _operator(name: str, row: Any) -> OperatorParts:
    row = _mapping(row, name)
    inputs = row.get("parallel_strategy", [])
    if not isinstance(inputs, list):
        raise ValueError(f"{name}: parallel_strategy is not a list")
    stage = _integer(row, "stage")
    if stage < 0:
        raise ValueError(f"{name}: stage {stage} is negative")
    cuts = tuple(_integers({"parallel_strategy": dims}, "parallel_strategy") for dims in inputs)
    return OperatorParts(name, stage, cuts)


def _slicing(name: str, row: Any) -> Slicing:
    row = _mapping(row, name)
    try:
        return Slicing(
            devices=_integers(row, "dev_matrix"),
            dims=tuple(() if n == -1 else (n,) for n in _integers(row, "tensor_map")),
            shard_size=_integer(row, "opt_weight_shard_size"),
            shard_step=_integer(row, "opt_weight_shard_step"),
            field=_integer(row, "field"),
            split_shape=_integers({"param_split_shape": []} | row, "param_split_shape"),
            offsets=_integers({"indices_offset": []} | row, "indices_offset"),
            shape=_shape(row) if "tensor_shape" in row else None,
        )
    except ValueError as error:
        raise ValueError(f"parameter {name}: {error}") from error


def _shape(row: dict[str, Any]) -> tuple[int, ...]:
    shape = _integers(row, "tensor_shape")
    if any(n < 0 for n in shape):
        raise ValueError(f"tensor_shape has a negative dim: {list(shape)}")
    return shape


def _mapping(value: Any, label: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{label} is not a mapping")
    return value


def _integer(row: dict[str, Any], key: str) -> int:
    value = row.get(key)
    if type(value) is not int or abs(value) >= 1 << 63:
        raise ValueError(f"{key} is {brief(value)}, not a whole number")
    return value


def _short(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and len(value) <= DIMS


def _integers(row: dict[str, Any], key: str) -> tuple[int, ...]:
    value = row.get(key)
    if not _short(value) or not all(type(n) is int and abs(n) < 1 << 63 for n in value):
        raise ValueError(f"{key} is {brief(value)}, not a list of whole numbers")
    return tuple(value)


def form_of(data: bytes) -> StrategyForm:
    """Returns the format of a file, by its content: no protobuf message here starts with a brace."""
    return "json" if data.lstrip()[:1] == b"{" else "protobuf"


def parse(data: bytes, origin: str) -> StrategyFile:
    """Parses a strategy file. Raises ``ValueError`` naming ``origin`` if it is of neither format."""
    form = form_of(data)
    try:
        return parse_json(data) if form == "json" else protobuf.parse(data)
    except ValueError as error:
        raise ValueError(f"{origin}: not a MindSpore strategy file ({form}): {error}") from error


def read_strategy(path: Path) -> StrategyFile:
    return parse(read_bytes(path), str(path))


def strategy_text(file: StrategyFile, form: StrategyForm) -> bytes:
    return json_text(file) if form == "json" else protobuf.serialize(file)


def write_strategy(path: Path, file: StrategyFile, form: StrategyForm) -> None:
    """Writes or replaces the file; it is synced to disk on return."""
    write_bytes(path, strategy_text(file, form))


@dataclass(frozen=True)
class GroupFile:
    """The content of a group file.

    ``groups`` has the ranks of each collective group, by name; ``restore`` has the ranks whose checkpoints
    are equal.
    """

    groups: Mapping[str, tuple[int, ...]]
    restore: tuple[int, ...]


def parse_groups(data: bytes, origin: str) -> GroupFile:
    """Parses a group file. Raises ``ValueError`` naming ``origin`` if ``data`` is not one."""
    try:
        return _parse(data)
    except ValueError as error:
        raise ValueError(f"{origin}: not a MindSpore group file: {error}") from error


def read_groups(path: Path) -> GroupFile:
    return parse_groups(read_bytes(path), str(path))


def groups_text(file: GroupFile) -> bytes:
    items = (
        packet(1, packet(1, name.encode()) + packet(2, numbers(1, r))) for name, r in file.groups.items()
    )
    return b"".join(items) + packet(2, numbers(1, file.restore))


def _parse(data: bytes) -> GroupFile:
    message = ProtobufMessage(data, {1: BYTES, 2: BYTES})
    groups: dict[str, tuple[int, ...]] = {}
    for view in message.views(1):
        item = ProtobufMessage(view, {1: BYTES, 2: BYTES})
        name = item.text(1)
        if name in groups:
            raise ValueError(f"group {name} is listed twice")
        groups[name] = _ranks(item.view(2))
    return GroupFile(groups, _ranks(message.view(2)))


def _ranks(view: memoryview) -> tuple[int, ...]:
    ranks = ProtobufMessage(view, {1: NUMBERS}).numbers(1, MOST_FIELDS)
    if any(rank < 0 for rank in ranks):
        raise ValueError(f"a negative rank: {list(ranks)}")
    return ranks
