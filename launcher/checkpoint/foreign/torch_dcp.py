"""Reads folders of torch.distributed.checkpoint and files of torch.save without torch."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from launcher.checkpoint.box_bytes import box_index, stream_box
from launcher.checkpoint.layout.shards import full_box, untiled
from launcher.checkpoint.tensorfile.mmap_window import OPEN, Window
from launcher.checkpoint.tensorfile.safetensors import ByteRange, described, mapped
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.layout import Box
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.untrusted.files import DIMS, RefusedFile, brief, irregular, read_bytes
from launcher.untrusted.pickles import Bounded, RefusedPickle


class Record:
    """Stands in for an object of a listed class: it has the constructor's arguments and the pickled state."""

    __iter__: ClassVar[None] = None  # else Python treats it as a sequence without end

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, field: str) -> Any:
        return self.state.get(field) if isinstance(self.state, dict) else None


Known = Mapping[str, Any]
"""Maps ``module.name`` to its stand-in: a ``Record``, a plain value or a function of plain values."""


def plain(*args: Any) -> dict[str, Any]:
    """Stands in for ``OrderedDict()``, which pickles create empty and fill later.

    An argument is refused with ``RefusedPickle``, because copying it could take unbounded time.
    """
    if args:
        raise RefusedPickle("a mapping that is copied from another")
    return {}


def read(data: bytes, known: Known, storage: Callable[[Any], Any] | None = None) -> Any:
    """Returns the value of a pickle.

    ``storage`` makes the stand-in for a persistent id. Raises ``ValueError`` for anything but plain data.
    """
    try:
        return _Reader(data, known, storage).load()
    except RefusedPickle:
        raise
    except Exception as error:  # a broken or hostile stream can make the reader raise anything
        raise ValueError(f"not a pickle of plain data ({type(error).__name__})") from error


class _Reader(Bounded):
    keys: ClassVar = (*Bounded.keys, Record)

    def __init__(self, data: bytes, known: Known, storage: Callable[[Any], Any] | None) -> None:
        super().__init__(data)
        self._known = known
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name not in self._known:
            raise RefusedPickle(f"it uses {full_name}, which is not on the list of harmless names")
        return self._known[full_name]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise RefusedPickle("it refers to a storage outside the pickle")
        return self._storage(pid)


METADATA_FILE = ".metadata"
LONGEST_METADATA = 128 << 20
"""The most bytes of metadata. A chunk takes 140: Llama 3 70B with Adam on 256 ranks has 555 000 chunks."""
_CLASSES = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")  # fmt: skip
_PATHS = ("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "pathlib.PureWindowsPath",
          "pathlib._local.PosixPath", "pathlib._local.WindowsPath")  # fmt: skip


class _Tensor(Record): ...


class _Bytes(Record): ...


def _size(values: Any = ()) -> tuple[int, ...]:
    return _naturals(tuple(values) if isinstance(values, list) else values)


KNOWN_METADATA: Known = {
    **{f"torch.distributed.checkpoint.metadata.{name}": Record for name in _CLASSES},
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata": _Tensor,
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata": _Bytes,
    "torch.distributed.checkpoint.filesystem._StorageInfo": Record,
    "torch.serialization._get_layout": Record,
    "torch.Size": _size,
    "collections.OrderedDict": plain,
    "builtins.getattr": Record,  # Python 3.11.0 to 3.11.3 pickles a member of an enumeration with it
    **dict.fromkeys(_PATHS, Record),
    **{f"torch.{dtype}": dtype for dtype in ITEMSIZE},
}


@dataclass(frozen=True)
class Chunk:
    """The elements of ``box``, which ``torch.save`` wrote to ``length`` bytes at ``start`` of ``file``."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and its chunks, which tile it."""

    spec: TensorSpec
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """The content of a metadata file. ``others`` are the entries that are not tensors."""

    tensors: Mapping[str, StoredTensor]
    others: tuple[str, ...]


def read_metadata(folder: Path) -> Contents:
    """Reads a folder's metadata. Raises ``ValueError`` unless the chunks of every tensor tile it."""
    path = folder / METADATA_FILE
    try:
        return _contents(read(read_bytes(path, LONGEST_METADATA), KNOWN_METADATA))
    except RefusedFile:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{path}: not the metadata of a distributed checkpoint: {error}") from error


def _contents(root: Any) -> Contents:
    if not isinstance(root, Record) or not isinstance(root["state_dict_metadata"], dict):
        raise ValueError("not the metadata of a distributed checkpoint")
    listed = root["state_dict_metadata"]
    where = {
        (index["fqn"], _plain(index["offset"])): info for index, info in (root["storage_data"] or {}).items()
    }

    tensors = {name: _stored(name, meta, where) for name, meta in listed.items() if isinstance(meta, _Tensor)}
    odd = [name for name, meta in listed.items() if not isinstance(meta, _Tensor | _Bytes)]
    if odd:
        raise ValueError(f"{brief(odd[0])}: neither a tensor nor bytes")
    return Contents(tensors, tuple(name for name, meta in listed.items() if isinstance(meta, _Bytes)))


def _stored(name: Any, meta: _Tensor, where: Mapping[Any, Any]) -> StoredTensor:
    if not isinstance(name, str):
        raise ValueError(f"{brief(name)} is not the name of a tensor")
    spec = TensorSpec(_naturals(meta["size"]), _dtype(name, meta["properties"]))
    chunks = [_chunk(name, chunk, where) for chunk in meta["chunks"]]

    # the chunks must tile the tensor
    if any(len(chunk.box.hi) != len(spec.shape) for chunk in chunks):
        raise ValueError(f"tensor {name}: a piece does not have the dims of {list(spec.shape)}")
    wrong = untiled(spec.shape, [chunk.box for chunk in chunks])
    if wrong:
        raise ValueError(f"tensor {name}: {wrong}")
    return StoredTensor(spec, tuple(chunks))


def _chunk(name: str, chunk: Any, where: Mapping[Any, Any]) -> Chunk:
    lo = _naturals(chunk["offsets"])
    sizes = _naturals(chunk["sizes"])
    info = where.get((name, lo))
    if info is None or len(lo) != len(sizes):
        raise ValueError(f"tensor {name}: no file has its piece at {list(lo)}")
    if info["transform_descriptors"]:
        raise ValueError(f"tensor {name}: its files are compressed or transformed, which is not supported")

    # its file must be in this folder
    file = info["relative_path"]
    start, length = _naturals((info["offset"], info["length"]))
    if not isinstance(file, str) or "/" in file or "\\" in file or "\0" in file or file in ("", ".", ".."):
        raise ValueError(f"tensor {name}: {brief(file)} is not the name of a file in this folder")
    hi = tuple(a + n for a, n in zip(lo, sizes, strict=True))
    return Chunk(Box(lo, hi), file, start, length)


def _dtype(name: str, properties: Any) -> str:
    """Returns the dtype: the first of the properties, which are pickled as a tuple."""
    dtype = properties.state[0]
    if dtype not in ITEMSIZE:
        raise ValueError(f"tensor {name}: its dtype is unknown; supported dtypes: {', '.join(ITEMSIZE)}")
    return str(dtype)


def _naturals(values: Any) -> tuple[int, ...]:
    few = isinstance(values, tuple) and len(values) <= DIMS
    if not few or not all(type(n) is int and 0 <= n < 1 << 63 for n in values):
        raise ValueError(f"{brief(values)} is not a list of sizes")
    sizes: tuple[int, ...] = values
    return sizes


def _plain(offset: Any) -> Any:
    return offset if offset is None else _naturals(offset)


LONGEST_DESCRIPTION = 1 << 16  # the most bytes of the description of one tensor
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
class PickledTensor:
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


def find(data: memoryview, start: int, length: int) -> PickledTensor:
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
        tensor, entry = _described(part)
    except (zipfile.BadZipFile, KeyError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"not what torch.save writes: {error}") from error

    # the values start after the entry's head, which contains the lengths of its name and extra field
    head = bytes(part[entry.header_offset : entry.header_offset + HEAD])
    name = int.from_bytes(head[26:28], "little")
    extra = int.from_bytes(head[28:30], "little")
    base = start + entry.header_offset + HEAD + name + extra
    return _within(tensor, base, entry.file_size, start + length)


def _described(part: memoryview) -> tuple[_Rebuilt, zipfile.ZipInfo]:
    """Returns the tensor that the archive describes, and the archive's entry with its values."""
    with zipfile.ZipFile(_Part(part)) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if any(map(_compressed, entries.values())):
            raise ValueError("its archive is compressed, which torch.save never does")
        size = entries["data.pkl"].file_size
        if size > LONGEST_DESCRIPTION:
            raise ValueError(f"its description has {size} bytes, too many for one tensor")

        tensor = read(archive.read(entries["data.pkl"]), KNOWN, _storage)
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise ValueError("its values are not little-endian")

    if not isinstance(tensor, _Rebuilt) or not isinstance(tensor.storage, _Storage):
        raise ValueError("it is not a tensor")
    return tensor, entries[f"data/{tensor.storage.key}"]


def _compressed(info: zipfile.ZipInfo) -> bool:
    return info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size


def _within(t: _Rebuilt, base: int, nbytes: int, end: int) -> PickledTensor:
    """Returns the tensor whose values are ``nbytes`` at byte ``base``, in an archive that ends at ``end``.

    Raises ``ValueError`` if a value is outside these bytes.
    """
    dtype = t.dtype or t.storage.dtype
    naturals = all(type(n) is int and n >= 0 for n in (t.offset, *t.shape, *t.strides))
    if dtype not in ITEMSIZE or len(t.shape) != len(t.strides) or not naturals:
        raise ValueError("its description does not describe a tensor")

    # the last value must be within the bytes
    size = ITEMSIZE[dtype]
    last = t.offset + sum((n - 1) * stride for n, stride in zip(t.shape, t.strides, strict=True))
    if (0 not in t.shape and (last + 1) * size > nbytes) or base + nbytes > end:
        raise ValueError(f"its values need more than the {nbytes} bytes that are stored")
    return PickledTensor(
        TensorSpec(t.shape, dtype), base + t.offset * size, tuple(n * size for n in t.strides)
    )


def _storage(pid: Any) -> _Storage:
    _, kind, key, _, count = pid
    if kind != "bytes" and kind not in _STORAGES:
        raise ValueError(f"{kind!r} is not a storage")
    return _Storage(_STORAGES.get(kind), key, count)


class _Part(io.RawIOBase):
    """A range of memory as a readable file. It refuses large reads: an archive's directory is short."""

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
        remaining = max(self._data.nbytes - self._at, 0)
        size = remaining if size is None or size < 0 else min(size, remaining)
        if size > 2 * LONGEST_DESCRIPTION:
            raise OSError(f"its directory has {size} bytes, too many for one tensor")
        piece = bytes(self._data[self._at : self._at + size])
        self._at += size
        return piece

    def readinto(self, out: Any) -> int:
        piece = self._data[self._at : self._at + len(out)]
        out[: piece.nbytes] = piece
        self._at += piece.nbytes
        return piece.nbytes


class DcpFolder:
    """A DCP folder. ``specs`` are keyed by state-dict name; ``others`` are entries that are not tensors."""

    def __init__(self, folder: Path, contents: Contents) -> None:
        self.folder = folder
        self.others = contents.others
        self._tensors = contents.tensors
        self.specs: Mapping[str, TensorSpec] = {
            name: stored.spec for name, stored in contents.tensors.items()
        }
        self._map = lru_cache(maxsize=OPEN)(mapped)
        self._window = Window()
        self._saved = {
            name: [self._find(name, c) for c in stored.chunks] for name, stored in self._tensors.items()
        }

    def apart(self) -> DcpFolder:
        """Returns another object for the same folder, for use by another thread."""
        other = copy(self)
        other._window = Window()
        return other

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yields the bytes of the tensor, in order. A chunk is valid until the next one is taken."""
        spec = self.specs[name]
        return stream_box(full_box(spec.shape), spec.dtype, lambda part, out: self.fill(name, part, out))

    def _find(self, name: str, chunk: Chunk) -> PickledTensor:
        path = self.folder / chunk.file
        kind = irregular(path)
        if kind:
            raise ValueError(f"{path}: {kind}; tensor {name} should be in this file")
        if not path.is_file():
            raise ValueError(f"{path}: no such file; tensor {name} should be in it")
        try:
            if not path.stat().st_size:
                raise ValueError("truncated: it is empty")
            saved = find(memoryview(self._map(path)), chunk.start, chunk.length)
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name}: {error}") from error

        expected = TensorSpec(chunk.box.shape, self.specs[name].dtype)
        if saved.spec != expected:
            difference = f"{described(saved.spec)}, {METADATA_FILE} says {described(expected)}"
            raise ValueError(f"{path}: tensor {name}: its piece at {list(chunk.box.lo)} is {difference}")
        return saved

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        """Copies ``part`` of the tensor into ``out``, an array of the form that ``words`` returns."""
        for chunk, saved in zip(self._tensors[name].chunks, self._saved[name], strict=True):
            both = chunk.box & part
            if not both:
                continue
            there = box_index(both.within(chunk.box))
            here = out[box_index(both.within(part))]

            # the window reads contiguous tensors only
            path = self.folder / chunk.file
            if saved.contiguous:
                slot = ByteRange(saved.spec, saved.start, saved.start + saved.spec.nbytes)
                self._window.copy(path, slot, there, here)
            else:
                kind = f"u{ITEMSIZE[saved.spec.dtype]}"
                tensor = np.ndarray(saved.spec.shape, kind, self._map(path), saved.start, saved.strides)
                here[...] = tensor[there]


def read_dcp(folder: Path) -> DcpFolder:
    """Opens a folder, and checks the head of every chunk of every tensor.

    Raises ``ValueError`` naming the file and the tensor.
    """
    return DcpFolder(folder, read_metadata(folder))
