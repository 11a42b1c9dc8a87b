"""Reads ``.metadata`` of a DCP folder, which lists the tensors and the file and bytes of each chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checkpoint.foreign.dcp.plain_pickle import Known, Record, plain, read
from launcher.checkpoint.layout.tiling import untiled
from launcher.plan.values.facts import ITEMSIZE, TensorSpec
from launcher.plan.values.layout import Box
from launcher.untrusted.files import DIMS, RefusedFile, brief, read_bytes

NAME = ".metadata"
LONGEST = 128 << 20
"""The most bytes. A piece takes 140: Llama 3 70B with Adam over 256 ranks has 555 000 pieces, in 78 MB."""
_CLASSES = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")  # fmt: skip
_PATHS = ("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "pathlib.PureWindowsPath",
          "pathlib._local.PosixPath", "pathlib._local.WindowsPath")  # fmt: skip


class _Tensor(Record): ...


class _Bytes(Record): ...


def _size(values: Any = ()) -> tuple[int, ...]:
    return _naturals(tuple(values) if isinstance(values, list) else values)


KNOWN: Known = {
    **{f"torch.distributed.checkpoint.metadata.{name}": Record for name in _CLASSES},
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata": _Tensor,
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata": _Bytes,
    "torch.distributed.checkpoint.filesystem._StorageInfo": Record,
    "torch.serialization._get_layout": Record,
    "torch.Size": _size,
    "collections.OrderedDict": plain,
    "builtins.getattr": Record,  # how Python 3.11.0 to 3.11.3 writes the member of an enumeration
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
    """The content of the file. ``others`` are the entries that are not tensors."""

    tensors: Mapping[str, StoredTensor]
    others: tuple[str, ...]


def read_metadata(folder: Path) -> Contents:
    """Reads the metadata. Raises ``ValueError`` naming the file unless the chunks of every tensor tile it."""
    path = folder / NAME
    try:
        return _contents(read(read_bytes(path, LONGEST), KNOWN))
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
        raise ValueError(f"{brief(name)} is no name of a tensor")
    spec = TensorSpec(_naturals(meta["size"]), _dtype(name, meta["properties"]))
    chunks = [_chunk(name, chunk, where) for chunk in meta["chunks"]]

    # the chunks must tile the tensor
    if any(len(chunk.box.hi) != len(spec.shape) for chunk in chunks):
        raise ValueError(f"tensor {name}: a piece has other dims than {list(spec.shape)}")
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
        raise ValueError(
            f"tensor {name}: its files are compressed or otherwise transformed, which is not read"
        )

    # its file must be in this folder
    file = info["relative_path"]
    start, length = _naturals((info["offset"], info["length"]))
    if not isinstance(file, str) or "/" in file or "\\" in file or "\0" in file or file in ("", ".", ".."):
        raise ValueError(f"tensor {name}: {brief(file)} is not the name of a file in this folder")
    hi = tuple(a + n for a, n in zip(lo, sizes, strict=True))
    return Chunk(Box(lo, hi), file, start, length)


def _dtype(name: str, properties: Any) -> str:
    """Returns the dtype: the first of the properties, which are pickled as a tuple."""
    found = properties.state[0]
    if found not in ITEMSIZE:
        raise ValueError(f"tensor {name}: a dtype that is not known; known are {', '.join(ITEMSIZE)}")
    return str(found)


def _naturals(values: Any) -> tuple[int, ...]:
    few = isinstance(values, tuple) and len(values) <= DIMS
    if not few or not all(type(n) is int and 0 <= n < 1 << 63 for n in values):
        raise ValueError(f"{brief(values)} are no sizes")
    found: tuple[int, ...] = values
    return found


def _plain(offset: Any) -> Any:
    return offset if offset is None else _naturals(offset)
