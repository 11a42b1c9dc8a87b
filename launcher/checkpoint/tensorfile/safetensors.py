"""Reads and writes safetensors files."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from launcher.checkpoint.tensorfile import watched_folder
from launcher.checkpoint.tensorfile.disk import WriteBehind, named_errors, reserve, run_at_once, start
from launcher.checkpoint.tensorfile.encryption import EncryptedFile, Encryptor, encrypted_size, is_encrypted
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.untrusted.files import DIMS, LONGEST_TEXT, brief, opened, parsed, without_collection

Bytes = bytes | bytearray | memoryview | npt.NDArray[Any]

CODES = {
    "float64": "F64", "int64": "I64", "complex64": "C64", "float32": "F32", "int32": "I32", "float16": "F16",
    "bfloat16": "BF16", "int16": "I16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8",
    "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Blob:
    """One tensor. ``data`` is a flat view of bytes. ``Blob.of`` makes one from any contiguous buffer."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], data: Bytes) -> Blob:
        """Wraps a buffer without a copy.

        Raises ``ValueError`` for an unknown dtype, a wrong length or a strided buffer.

        >>> Blob.of("bfloat16", (2,), b"abcd").data.nbytes
        4
        """
        if dtype not in ITEMSIZE:
            raise ValueError(f"dtype {dtype} is unknown; supported dtypes: {', '.join(ITEMSIZE)}")
        spec = TensorSpec(shape, dtype)
        try:
            flat = np.frombuffer(data, np.uint8).data
        except ValueError as error:
            raise ValueError(
                f"the data of a {described(spec)} tensor is not contiguous: copy it first"
            ) from error
        if flat.nbytes != spec.nbytes:
            raise ValueError(f"a {described(spec)} tensor has {spec.nbytes} bytes, not {flat.nbytes}")
        return cls(dtype, shape, flat)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, self.dtype)


def described(spec: TensorSpec) -> str:
    """Returns a spec as messages show it: ``float32[4, 8]``."""
    return f"{spec.dtype}{list(spec.shape)}"


def words(data: Bytes | Any, spec: TensorSpec, offset: int = 0) -> npt.NDArray[Any]:
    """Returns a view of the tensor at byte ``offset`` of ``data``; its elements are unsigned integers.

    They have the size of the dtype. They are for copies, not for arithmetic.
    """
    flat = np.frombuffer(data, np.uint8, spec.nbytes, offset)
    return flat.view(f"u{ITEMSIZE[spec.dtype]}").reshape(spec.shape)


LONGEST_HEADER = LONGEST_TEXT  # the most bytes of a header
METADATA = "__metadata__"


@dataclass(frozen=True)
class ByteRange:
    """The bytes of a tensor: ``start`` up to ``stop``, counted from the beginning of the file."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A parsed header. ``entries`` are in file order; ``size`` is of the file, ``digest`` of the header."""

    entries: Mapping[str, ByteRange]
    metadata: Mapping[str, str]
    size: int
    digest: str


def arrange(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, Header]:
    """Returns the head of a file with these tensors, as bytes and parsed.

    The widest dtypes come first, so that each tensor is aligned; within a width tensors are sorted by name.
    Raises ``ValueError`` if the header would be too long, or a tensor has a reserved name.
    """
    if METADATA in specs:
        raise ValueError(f"{METADATA} cannot be the name of a tensor in a safetensors file")
    rows: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}

    # the offsets of each tensor, counted from the end of the header
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name in sorted(specs, key=lambda name: (-ITEMSIZE[specs[name].dtype], name)):
        spec = specs[name]
        offsets[name] = (end, end + spec.nbytes)
        rows[name] = {"dtype": CODES[spec.dtype], "shape": spec.shape, "data_offsets": offsets[name]}
        end += spec.nbytes

    # the header itself, padded so that the tensors are aligned
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise ValueError(
            f"the header of {len(specs)} tensors in one file would have {len(text)} bytes; "
            f"at most {LONGEST_HEADER} are read"
        )
    head = len(text).to_bytes(8, "little") + text
    entries = {name: ByteRange(specs[name], len(head) + a, len(head) + b) for name, (a, b) in offsets.items()}
    return head, Header(entries, dict(metadata), len(head) + end, xxhash.xxh3_128_hexdigest(head))


def read_header(path: Path, key: bytes | None = None) -> Header:
    """Reads the header of a file.

    ``key`` decrypts an encrypted file; the header's ``size`` is then the size of the plain text. Raises
    ``ValueError`` naming the file unless the tensors fill it exactly: without gap, overlap or truncation.
    """
    if key is not None:
        sealed = EncryptedFile(path, key)
        return _read(path, BytesIO(sealed.read(0, min(8, sealed.size))), sealed.size, sealed)
    with opened(path) as file:
        return _read(path, file, os.fstat(file.fileno()).st_size, None)


def _read(path: Path, file: BinaryIO, size: int, sealed: EncryptedFile | None) -> Header:
    head = file.read(8)
    if is_encrypted(head):
        raise ValueError(
            f"{path}: it is encrypted: give the checkpoint folder, whose manifest says where the key is"
        )
    if len(head) < 8:
        raise ValueError(f"{path}: truncated: a safetensors file has at least 8 bytes, this one {size}")

    # the header, which must fit into the file and into memory
    length = int.from_bytes(head, "little")
    if length > LONGEST_HEADER:
        raise ValueError(
            f"{path}: not a safetensors file: its header claims {length} bytes, "
            f"at most {LONGEST_HEADER} are read"
        )
    if length > size - 8:
        raise ValueError(f"{path}: truncated: its header ends at byte {8 + length}, the file has {size}")
    text = file.read(length) if sealed is None else sealed.read(8, 8 + length)
    try:
        return _parse(text, head, size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@without_collection()
def _parse(text: bytes, head: bytes, size: int) -> Header:
    rows = _parsed_header(text)
    metadata = rows.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{METADATA} is not a mapping of text to text")

    # the tensors must follow each other without a gap up to the end of the file
    base = len(head) + len(text)
    slots = {name: _slot(name, rows.pop(name), base) for name in [*rows]}  # each frees its row
    entries = dict(sorted(slots.items(), key=lambda item: (item[1].start, item[1].stop)))
    del slots
    end = base
    for name, slot in entries.items():
        if slot.start != end:
            raise ValueError(f"tensor {name} starts at byte {slot.start}, the one before it ends at {end}")
        end = slot.stop
    if end > size:
        raise ValueError(f"truncated: its tensors end at byte {end}, the file has {size}")
    if end < size:
        raise ValueError(f"{size - end} bytes follow the last tensor, which ends at byte {end}")
    return Header(entries, metadata, size, xxhash.xxh3_128_hexdigest(head + text))


def _parsed_header(text: bytes) -> dict[str, Any]:
    try:
        rows = parsed(text, unique=True)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError("not a safetensors file: its header is not JSON") from error
    if not isinstance(rows, dict):
        raise ValueError("not a safetensors file: its header is not a mapping")
    return rows


def _slot(name: str, row: Any, base: int) -> ByteRange:
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name} needs dtype, shape and data_offsets")
    if not isinstance(row["dtype"], str) or row["dtype"] not in DTYPES:
        dtype = row["dtype"][:20] if isinstance(row["dtype"], str) else brief(row["dtype"])
        raise ValueError(f"tensor {name} has dtype {dtype}; supported: {', '.join(DTYPES)}")
    if not _naturals(row["shape"]) or not _naturals(row["data_offsets"]) or len(row["data_offsets"]) != 2:
        raise ValueError(f"tensor {name} has shape {brief(row['shape'])} at {brief(row['data_offsets'])}")
    spec = _spec(tuple(row["shape"]), DTYPES[row["dtype"]])
    start, stop = row["data_offsets"]
    if stop - start != spec.nbytes:
        raise ValueError(f"tensor {name} takes {stop - start} bytes, {described(spec)} needs {spec.nbytes}")
    return ByteRange(spec, base + start, base + stop)


@lru_cache(maxsize=1024)  # a file has few different ones, for any number of names
def _spec(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    return TensorSpec(shape, dtype)


def _naturals(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= DIMS
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
    )


CHUNK = 8 << 20  # bytes copied or mapped at once; a copy from file to file keeps a few chunks in memory
STRETCH = 32 << 20  # bytes of a file after which the kernel is requested to start writing them to disk


@dataclass(frozen=True)
class FileRecord:
    """The size and the digests of a written file; digests are hexadecimal.

    For a tensor file, ``digest`` covers the header and ``tensors`` has one digest for each tensor (xxh3, 128
    bits); both are of the plain text. For any other file, ``digest`` covers all bytes (SHA-256). ``salt`` is
    the salt of an encrypted file, as ``salt_of`` returns it; no other file has the same.
    """

    size: int
    digest: str
    tensors: Mapping[str, str]
    salt: str | None = None


class FileWriter:
    """A safetensors file that is created at its full size; its bytes can be written in any order.

    It is synced to disk when the block ends without an error or, with ``behind``, later by that thread.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        metadata: Mapping[str, str],
        key: bytes | None = None,
        behind: WriteBehind | None = None,
    ) -> None:
        """With a ``key``, the file is encrypted, and its bytes must be written in order."""
        self.path = path
        head, self.header = arrange(specs, metadata)
        self.size = self.header.size if key is None else encrypted_size(self.header.size)
        self._do = run_at_once if behind is None else behind.do
        self._handed_over = 0  # the kernel was requested to write the bytes up to here to disk
        self._sealer: Encryptor | None = None

        with named_errors(path, self.size):
            self._fd = watched_folder.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            # reserve all of its disk space before the first byte is written
            with named_errors(path, self.size):
                reserve(self._fd, self.size)
            if key is not None:
                self._sealer = Encryptor(path, self._fd, self.header.size, key)
            self.write(0, memoryview(head))
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def salt(self) -> str | None:
        return None if self._sealer is None else self._sealer.salt

    def write(self, at: int, data: memoryview) -> None:
        """Writes ``data`` at byte ``at`` of the file, or of its plain text if it is encrypted."""
        end = at + data.nbytes
        assert end <= self.header.size, (at, data.nbytes)
        if self._sealer is not None:
            self._sealer.write(at, data)
        else:
            with named_errors(self.path, self.size):
                while data:
                    done = os.pwrite(self._fd, data, at)
                    at, data = at + done, data[done:]

        # keep the disk busy while more is written
        if end - self._handed_over >= STRETCH:
            self._do(partial(start, self._fd, self._handed_over, end - self._handed_over))
            self._handed_over = end

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._sealer is not None:
                self._sealer.finish()
        except BaseException:
            self._do(partial(os.close, self._fd))
            raise
        self._do(partial(os.close, self._fd) if kind is not None else self._sync)

    def _sync(self) -> None:
        try:
            with named_errors(self.path, self.size):
                os.fsync(self._fd)
        finally:
            os.close(self._fd)


def write_stream(
    path: Path,
    specs: Mapping[str, TensorSpec],
    chunks: Callable[[str], Iterable[memoryview]],
    metadata: Mapping[str, str],
    key: bytes | None = None,
    *,
    digested: bool = True,
    behind: WriteBehind | None = None,
) -> FileRecord:
    """Writes a file whose tensors come in chunks, and computes each tensor's digest.

    The file is synced to disk on return or, with ``behind``, once ``behind.wait`` returns.

    Args:
        path: The file.
        specs: The tensors by name.
        chunks: Returns a tensor's bytes, in order; each chunk is valid until the next one.
        metadata: The metadata in the header.
        key: The key to encrypt the file with. Digests are of the plain text.
        digested: False if the caller does not need the tensors' digests.
        behind: The thread that syncs the file.
    """
    digests = {}
    with FileWriter(path, specs, metadata, key=key, behind=behind) as file:
        for name, slot in file.header.entries.items():
            at = slot.start
            digest = xxhash.xxh3_128()
            for chunk in chunks(name):
                assert at + chunk.nbytes <= slot.stop, (name, at - slot.start, chunk.nbytes)
                file.write(at, chunk)
                if digested:
                    digest.update(chunk)
                at += chunk.nbytes

            assert at == slot.stop, (name, at - slot.start)
            if digested:
                digests[name] = digest.hexdigest()
    return FileRecord(file.size, file.header.digest, digests, file.salt)


def sliced(data: memoryview) -> Iterator[memoryview]:
    """Yields ``data`` in order, ``CHUNK`` bytes at a time."""
    return (data[at : at + CHUNK] for at in range(0, data.nbytes, CHUNK))


def mapped(path: Path, access: int = mmap.ACCESS_READ) -> mmap.mmap:
    """Maps a file into memory. The map is closed when nothing refers to it any more."""
    with opened(path) as file:
        return mmap.mmap(file.fileno(), 0, access=access)


def blob_at(data: mmap.mmap, header: Header, name: str) -> Blob:
    """Returns tensor ``name`` of a mapped file, without a copy."""
    slot = header.entries[name]
    return Blob(slot.spec.dtype, slot.spec.shape, memoryview(data)[slot.start : slot.stop])
