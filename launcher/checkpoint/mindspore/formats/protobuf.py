"""Reads and writes strategy files in MindSpore's protobuf format."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.checkpoint.mindspore.formats.strategy import Operator, Slicing, StrategyFile
from launcher.checkpoint.mindspore.formats.wire import BYTES, NUMBERS, VARINT, Message, numbers, packet

# the fields of ParallelStrategyMap and of the messages in it (package mindspore.straspb)
_MAP = {1: VARINT, 2: BYTES, 3: BYTES}
_ITEM = {1: BYTES, 2: BYTES}
_STRATEGYS = {1: VARINT, 2: BYTES}
_LAYOUTS = {1: BYTES, 2: BYTES, 3: BYTES, 4: BYTES, 5: VARINT, 6: VARINT, 7: VARINT}
_DIM = {1: NUMBERS}


def parse(data: bytes) -> StrategyFile:
    message = Message(data, _MAP)
    layouts: dict[str, Slicing] = {}
    for view in message.views(3):
        item = Message(view, _ITEM)
        name = item.text(1)
        if name in layouts:
            raise ValueError(f"parameter {name} is listed twice")
        try:
            layouts[name] = _slicing(Message(item.view(2), _LAYOUTS))
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from error
    return StrategyFile(message.number(1), tuple(map(_operator, message.views(2))), layouts)


def text(file: StrategyFile) -> bytes:
    """Returns the file's bytes exactly as MindSpore's serializer writes them."""
    out = [numbers(1, [file.counter])]
    for op in file.operators:
        inputs = b"".join(packet(2, numbers(1, dims)) for dims in op.inputs)
        out.append(packet(2, packet(1, op.name.encode()) + packet(2, numbers(1, [op.stage]) + inputs)))
    out += (packet(3, packet(1, name.encode()) + packet(2, _layouts(s))) for name, s in file.layouts.items())
    return b"".join(out)


def _operator(view: memoryview) -> Operator:
    item = Message(view, _ITEM)
    strategys = Message(item.view(2), _STRATEGYS)
    inputs = tuple(Message(v, _DIM).numbers(1) for v in strategys.views(2))
    stage = strategys.number(1)
    if stage < 0:
        raise ValueError(f"operator {item.text(1)}: stage {stage}")
    return Operator(item.text(1), stage, inputs)


def _slicing(layouts: Message) -> Slicing:
    maps = [Message(v, _DIM).numbers(1) for v in layouts.views(2)]
    return Slicing(
        devices=Message(layouts.view(1), _DIM).numbers(1),
        dims=_dims(maps),
        nested=len(maps) > 1,
        shard_size=layouts.number(7),
        shard_step=layouts.number(6),
        field=layouts.number(5),
        split_shape=_optional(layouts.views(3)),
        offsets=_optional(layouts.views(4)),
    )


def _dims(maps: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Returns the axes that cut each dim.

    The file has one message per dim, or a single message with one axis, or -1, per dim.
    """
    if len(maps) > 1:
        return _nested(maps)
    return tuple(() if axis == -1 else (axis,) for axes in maps for axis in axes)


def _nested(maps: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Returns the axes of each dim from one message per dim.

    A vector has an empty second message, which distinguishes it from a map in a single message.
    """
    if len(maps) == 2 and not maps[1]:
        maps = maps[:1]
    empty = [dim for dim, axes in enumerate(maps) if not axes]
    if empty:
        raise ValueError(f"the tensor map of dim {empty[0]} is empty")
    return tuple(() if axes == (-1,) else axes for axes in maps)


def _optional(views: Sequence[memoryview]) -> tuple[int, ...]:
    if len(views) > 1:
        raise ValueError(f"{len(views)} split shapes or offsets, not one")
    return Message(views[0], _DIM).numbers(1) if views else ()


def _layouts(s: Slicing) -> bytes:
    maps: list[Sequence[int]] = [[*dim] or [-1] for dim in s.dims]
    if not s.nested:
        assert all(len(dim) == 1 for dim in maps), s
        maps = [[axis for dim in maps for axis in dim]]
    elif len(maps) == 1:
        maps.append([])
    lists = [(1, s.devices), *((2, dim) for dim in maps), (3, s.split_shape), (4, s.offsets)]
    single = [(5, s.field), (6, s.shard_step), (7, s.shard_size)]
    packed = (packet(number, numbers(1, values)) for number, values in lists)
    return b"".join(packed) + b"".join(numbers(number, [value]) for number, value in single)
