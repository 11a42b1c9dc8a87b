"""Reads and writes protobuf's wire format, as far as MindSpore's files use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from launcher.untrusted.files import DIMS

VARINT, BYTES = 0, 2
NUMBERS = -1  # not a kind on the wire: repeated numbers, either in a field each or packed into one
LONGEST = 10  # the most bytes of a varint
MOST = 1 << 20  # the most fields of a message (a layout per tensor), or numbers in it (one per rank)
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
            raise ValueError(f"truncated: a field goes from byte {at} to {end}, what holds it ends at {stop}")
        yield Field(number, kind, value=0, start=at, stop=end)
        at = end


def varint(read: Read, at: int, stop: int) -> tuple[int, int]:
    """Returns the unsigned number at byte ``at``, and the offset after it."""
    value = 0
    for i, byte in enumerate(read(at, min(at + LONGEST, stop))):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            if value >> 64:
                break
            return value, at + i + 1
    if stop - at < LONGEST:
        raise ValueError(f"truncated: it ends within the number at byte {at}")
    raise ValueError(f"the number at byte {at} has more than 64 bits")


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class Message:
    """A small message in memory. ``kinds`` lists the fields that it may have, each with its kind."""

    def __init__(self, data: bytes | memoryview, kinds: Mapping[int, int]) -> None:
        self._data = memoryview(data)
        self._found: dict[int, list[Field]] = {number: [] for number in kinds}
        for field in fields(lambda a, b: self._data[a:b], 0, len(data)):
            if field.number not in kinds:
                raise ValueError(f"field {field.number} is not known")
            if kinds[field.number] not in (field.kind, NUMBERS):
                raise ValueError(f"field {field.number} is of another kind")
            self._found[field.number].append(field)
            if len(self._found[field.number]) > MOST:
                raise ValueError(f"field {field.number} is there more than {MOST} times")

    def views(self, number: int) -> list[memoryview]:
        return [self._data[f.start : f.stop] for f in self._found[number]]

    def view(self, number: int) -> memoryview:
        views = self.views(number)
        if len(views) != 1:
            raise ValueError(f"field {number} is there {len(views)} times, not once")
        return views[0]

    def text(self, number: int) -> str:
        return text(bytes(self.view(number)))

    def number(self, number: int) -> int:
        values = self.numbers(number)
        if len(values) != 1:
            raise ValueError(f"field {number} has {len(values)} values, not one")
        return values[0]

    def numbers(self, number: int, most: int = DIMS) -> tuple[int, ...]:
        """Returns a field's signed numbers, whether they are packed into one field or in a field each.

        Raises ``ValueError`` for more than ``most``.
        """
        found = tuple(signed(v) for f in self._found[number] for v in islice(self._values(f), most + 1))
        if len(found) > most:
            raise ValueError(f"field {number} has more than {most} values")
        return found

    def _values(self, field: Field) -> Iterator[int]:
        if field.kind == VARINT:
            yield field.value
        at = field.start
        while at < field.stop:
            value, at = varint(lambda a, b: self._data[a:b], at, field.stop)
            yield value


def text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{data[:40]!r} is no name: not UTF-8") from error


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
