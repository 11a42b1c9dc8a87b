"""Locates one tensor that ``torch.save`` wrote within a file: the start of its values and their strides."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from typing import Any

from launcher.checkpoint.foreign.dcp.plain_pickle import Known, plain, read
from launcher.plan.values.facts import ITEMSIZE, TensorSpec

LONGEST = 1 << 16  # the most bytes of the description of one tensor
HEAD = 30  # bytes before the name of an entry in a zip archive
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16",
    "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
}  # fmt: skip


@dataclass(frozen=True)
class _Storage:
    dtype: str | None  # None: plain bytes
    key: str
    count: int


@dataclass(frozen=True)
class _Rebuilt:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None


@dataclass(frozen=True)
class Saved:
    """A tensor in a file. Its first value is at byte ``start`` of the file; ``strides`` are in bytes."""

    spec: TensorSpec
    start: int
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        step = ITEMSIZE[self.spec.dtype]
        for n, stride in zip(reversed(self.spec.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != step:
                return False
            step *= n
        return True


def _rebuilt(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> _Rebuilt:
    dtype = more[2] if len(more) > 2 and isinstance(more[2], str) else None
    return _Rebuilt(storage, offset, shape, strides, dtype=dtype)


KNOWN: Known = {
    "torch._utils._rebuild_tensor_v2": _rebuilt,
    "torch._utils._rebuild_tensor_v3": _rebuilt,
    "collections.OrderedDict": plain,
    "torch.storage.UntypedStorage": "bytes",
    **{f"torch.{name}": name for name in _STORAGES},
    **{f"torch.{dtype}": dtype for dtype in ITEMSIZE},
}


def find(data: memoryview, start: int, length: int) -> Saved:
    """Locates the tensor in the archive that is ``length`` bytes at ``start`` of a file.

    Raises ``ValueError`` if the archive is not a single tensor.
    """
    if start + length > data.nbytes:
        raise ValueError(
            f"truncated: it should be in bytes {start} to {start + length}, the file has {data.nbytes}"
        )
    part = data[start : start + length]

    # the tensor's description, and the archive's entry with its values
    try:
        found, at = _described(part)
    except (zipfile.BadZipFile, KeyError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"not what torch.save writes: {error}") from error

    # the values start after the entry's head, which contains the lengths of its name and extra field
    head = bytes(part[at.header_offset : at.header_offset + HEAD])
    name = int.from_bytes(head[26:28], "little")
    extra = int.from_bytes(head[28:30], "little")
    base = start + at.header_offset + HEAD + name + extra
    return _within(found, base, at.file_size, start + length)


def _described(part: memoryview) -> tuple[_Rebuilt, zipfile.ZipInfo]:
    """Returns the tensor that the archive describes, and the archive's entry with its values."""
    with zipfile.ZipFile(_Part(part)) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if any(map(_compressed, entries.values())):
            raise ValueError("its archive is compressed, which torch.save never does")
        size = entries["data.pkl"].file_size
        if size > LONGEST:
            raise ValueError(f"its description has {size} bytes, no single tensor's")

        found = read(archive.read(entries["data.pkl"]), KNOWN, _storage)
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise ValueError("its numbers are not little-endian")

    if not isinstance(found, _Rebuilt) or not isinstance(found.storage, _Storage):
        raise ValueError("it is no tensor")
    return found, entries[f"data/{found.storage.key}"]


def _compressed(info: zipfile.ZipInfo) -> bool:
    return info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size


def _within(t: _Rebuilt, base: int, nbytes: int, end: int) -> Saved:
    """Returns the tensor whose values are ``nbytes`` at byte ``base``, in an archive that ends at ``end``.

    Raises ``ValueError`` if a value is outside these bytes.
    """
    dtype = t.dtype or t.storage.dtype
    naturals = all(type(n) is int and n >= 0 for n in (t.offset, *t.shape, *t.strides))
    if dtype not in ITEMSIZE or len(t.shape) != len(t.strides) or not naturals:
        raise ValueError("its description is no tensor's")

    # the last value must be within the bytes
    size = ITEMSIZE[dtype]
    last = t.offset + sum((n - 1) * stride for n, stride in zip(t.shape, t.strides, strict=True))
    if (0 not in t.shape and (last + 1) * size > nbytes) or base + nbytes > end:
        raise ValueError(f"its numbers end behind the {nbytes} bytes that are there")
    return Saved(TensorSpec(t.shape, dtype), base + t.offset * size, tuple(n * size for n in t.strides))


def _storage(pid: Any) -> _Storage:
    _, kind, key, _, count = pid
    if kind != "bytes" and kind not in _STORAGES:
        raise ValueError(f"{kind!r} is no storage")
    return _Storage(_STORAGES.get(kind), key, count)


class _Part(io.RawIOBase):
    """A range of memory as a readable file. It refuses large reads, because an archive's head is short."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self._at, self._data.nbytes)[whence]
        if at < 0:
            raise OSError(f"byte {at} is before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._data.nbytes - self._at, 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > 2 * LONGEST:
            raise OSError(f"{size} bytes of directory, no single tensor's")
        piece = bytes(self._data[self._at : self._at + size])
        self._at += size
        return piece

    def readinto(self, out: Any) -> int:
        piece = self._data[self._at : self._at + len(out)]
        out[: piece.nbytes] = piece
        self._at += piece.nbytes
        return piece.nbytes
