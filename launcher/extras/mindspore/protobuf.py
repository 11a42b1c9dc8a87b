"""Protobuf messages, streamed and bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from launcher.extras.mindspore.strategy import OperatorParts, Slicing, StrategyFile
from launcher.untrusted.files import DIMS

VARINT, BYTES = 0, 2
NUMBERS = -1  # not a kind on the wire: repeated numbers, either in a field each or packed into one
LONGEST_VARINT = 10  # the most bytes of a varint
MOST_FIELDS = 1 << 20  # the most fields of a message (a layout per tensor), or numbers in it (one per rank)
Read = Callable[[int, int], bytes | memoryview]
"""Returns the bytes from the first offset up to the second."""


@dataclass(frozen=True)
class Field:
    """A field of a message: ``value`` if it is a number, else the bytes from ``start`` up to ``stop``."""

    number: int
    kind: int
    value: int
    start: int
    stop: int


def fields(read: Read, start: int, stop: int) -> Iterator[Field]:
    """Yields the fields of the message between two offsets, without reading their content."""
    at = start
    while at < stop:
        begin = at
        key, at = varint(read, at, stop)
        number, kind = key >> 3, key & 7
        if kind not in (VARINT, BYTES) or not number:
            raise ValueError(f"byte {begin} does not start a field")

        # a number, or the length of the bytes that follow
        value, at = varint(read, at, stop)
        if kind == VARINT:
            yield Field(number, kind, value, start=at, stop=at)
            continue
        end = at + value
        if end > stop:
            raise ValueError(f"truncated: a field spans bytes {at} to {end}, but its parent ends at {stop}")
        yield Field(number, kind, value=0, start=at, stop=end)
        at = end


def varint(read: Read, at: int, stop: int) -> tuple[int, int]:
    """Returns the unsigned number at byte ``at``, and the offset after it."""
    value = 0
    for i, byte in enumerate(read(at, min(at + LONGEST_VARINT, stop))):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            if value >> 64:
                break
            return value, at + i + 1
    if stop - at < LONGEST_VARINT:
        raise ValueError(f"truncated: it ends within the number at byte {at}")
    raise ValueError(f"the number at byte {at} has more than 64 bits")


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class ProtobufMessage:
    """A small message in memory. ``kinds`` lists the fields that it may have, each with its kind."""

    def __init__(self, data: bytes | memoryview, kinds: Mapping[int, int]) -> None:
        self._data = memoryview(data)
        self._by_number: dict[int, list[Field]] = {number: [] for number in kinds}
        for field in fields(lambda a, b: self._data[a:b], 0, len(data)):
            if field.number not in kinds:
                raise ValueError(f"field {field.number} is not known")
            if kinds[field.number] not in (field.kind, NUMBERS):
                raise ValueError(f"field {field.number} is of the wrong kind")
            self._by_number[field.number].append(field)
            if len(self._by_number[field.number]) > MOST_FIELDS:
                raise ValueError(f"field {field.number} occurs more than {MOST_FIELDS} times")

    def views(self, number: int) -> list[memoryview]:
        return [self._data[f.start : f.stop] for f in self._by_number[number]]

    def view(self, number: int) -> memoryview:
        views = self.views(number)
        if len(views) != 1:
            raise ValueError(f"field {number} occurs {len(views)} times, not once")
        return views[0]

    def text(self, number: int) -> str:
        return utf8_text(bytes(self.view(number)))

    def number(self, number: int) -> int:
        values = self.numbers(number)
        if len(values) != 1:
            raise ValueError(f"field {number} has {len(values)} values, not one")
        return values[0]

    def numbers(self, number: int, most: int = DIMS) -> tuple[int, ...]:
        """Returns a field's signed numbers, whether they are packed into one field or in a field each.

        Raises ``ValueError`` for more than ``most``.
        """
        signed_numbers = tuple(
            signed(v) for f in self._by_number[number] for v in islice(self._values(f), most + 1)
        )
        if len(signed_numbers) > most:
            raise ValueError(f"field {number} has more than {most} values")
        return signed_numbers

    def _values(self, field: Field) -> Iterator[int]:
        if field.kind == VARINT:
            yield field.value
        at = field.start
        while at < field.stop:
            value, at = varint(lambda a, b: self._data[a:b], at, field.stop)
            yield value


def utf8_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{data[:40]!r} is not a name: not UTF-8") from error


def shown(name: str) -> str:
    """Returns a name for messages, shortened: in a damaged file a name may have any length and characters."""
    return name if len(name) <= 200 and name.isprintable() else f"{name[:40]!a}..."


def encoded(value: int) -> bytes:
    """Returns a number as a varint, a negative one as its 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def head(number: int, size: int) -> bytes:
    """Returns the key and the length that precede a field of ``size`` bytes."""
    return encoded(number << 3 | BYTES) + encoded(size)


def packet(number: int, data: bytes) -> bytes:
    return head(number, len(data)) + data


def numbers(number: int, values: Iterable[int]) -> bytes:
    """Returns a repeated number, with one field per value."""
    return b"".join(encoded(number << 3 | VARINT) + encoded(value) for value in values)


# the fields of ParallelStrategyMap and of the messages in it (package mindspore.straspb)
_MAP = {1: VARINT, 2: BYTES, 3: BYTES}
_ITEM = {1: BYTES, 2: BYTES}
_STRATEGYS = {1: VARINT, 2: BYTES}
_LAYOUTS = {1: BYTES, 2: BYTES, 3: BYTES, 4: BYTES, 5: VARINT, 6: VARINT, 7: VARINT}
_DIM = {1: NUMBERS}


def parse(data: bytes) -> StrategyFile:
    message = ProtobufMessage(data, _MAP)
    layouts: dict[str, Slicing] = {}
    for view in message.views(3):
        item = ProtobufMessage(view, _ITEM)
        name = item.text(1)
        if name in layouts:
            raise ValueError(f"parameter {name} is listed twice")
        try:
            layouts[name] = _slicing(ProtobufMessage(item.view(2), _LAYOUTS))
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from error
    return StrategyFile(message.number(1), tuple(map(_operator, message.views(2))), layouts)


def serialize(file: StrategyFile) -> bytes:
    """Returns the file's bytes exactly as MindSpore's serializer writes them."""
    out = [numbers(1, [file.counter])]
    for op in file.operators:
        inputs = b"".join(packet(2, numbers(1, dims)) for dims in op.inputs)
        out.append(packet(2, packet(1, op.name.encode()) + packet(2, numbers(1, [op.stage]) + inputs)))
    out += (packet(3, packet(1, name.encode()) + packet(2, _layouts(s))) for name, s in file.layouts.items())
    return b"".join(out)


def _operator(view: memoryview) -> OperatorParts:
    item = ProtobufMessage(view, _ITEM)
    strategys = ProtobufMessage(item.view(2), _STRATEGYS)
    inputs = tuple(ProtobufMessage(v, _DIM).numbers(1) for v in strategys.views(2))
    stage = strategys.number(1)
    if stage < 0:
        raise ValueError(f"operator {item.text(1)}: stage {stage} is negative")
    return OperatorParts(item.text(1), stage, inputs)


def _slicing(layouts: ProtobufMessage) -> Slicing:
    maps = [ProtobufMessage(v, _DIM).numbers(1) for v in layouts.views(2)]
    return Slicing(
        devices=ProtobufMessage(layouts.view(1), _DIM).numbers(1),
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
    return ProtobufMessage(views[0], _DIM).numbers(1) if views else ()


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
