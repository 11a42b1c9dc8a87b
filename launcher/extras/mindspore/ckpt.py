"""Tensors of .ckpt files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path

import xxhash

from launcher.checkpoint.tensorfile.disk import named_errors
from launcher.checkpoint.tensorfile.safetensors import CHUNK, Blob, ByteRange, described
from launcher.checkpoint.tensorfile.watched_folder import open_file
from launcher.extras.mindspore.encryption import (
    ByteSource,
    CipherMode,
    CkptEncryptor,
    EncryptedCkpt,
    PlainFile,
    mode_of,
    write_at,
)
from launcher.extras.mindspore.protobuf import (
    BYTES,
    VARINT,
    Field,
    fields,
    head,
    numbers,
    packet,
    shown,
    signed,
    utf8_text,
    varint,
)
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.untrusted.files import DIMS

TEXT = "str"  # not a tensor dtype: a string that is saved among tensors, in UTF-32
DTYPES = {
    "Int8": "int8", "UInt8": "uint8", "Int16": "int16", "UInt16": "uint16", "Int32": "int32",
    "UInt32": "uint32", "Int64": "int64", "UInt64": "uint64", "Float16": "float16", "BFloat16": "bfloat16",
    "Float32": "float32", "Float64": "float64", "Bool": "bool", "Int4": "int4x2", TEXT: TEXT,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIZES = {
    "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int4x2": 1, TEXT: 4,
}  # fmt: skip
"""The bytes of an element; an element of ``int4x2`` has two numbers."""


def file_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * SIZES[spec.dtype]


CRC = b"crc_num"  # a file with a checksum ends with this and the CRC-32, big-endian
CRC_DIGITS = 10  # bytes of the CRC-32
NAME_LIMIT = 1 << 16  # bytes; a longer name means damage
ENTRIES = 1 << 19
"""The most entries of a file.

The largest published model has 140 000 tensors, and with optimizer states three times as many.
"""
FIELDS = 4 * DIMS  # the most fields of an entry; each of its dims may be a field


@dataclass(frozen=True)
class CkptEntry:
    """One tensor or string of a file.

    ``parts`` are the byte ranges that contain the bytes of the entry, in order; in an encrypted file they
    count decrypted bytes. A string is an entry of dtype ``str``; its length is its number of characters.
    """

    spec: TensorSpec
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Ckpt:
    """An open file. ``entries`` are in file order, strings included. Tensors stay on disk."""

    path: Path
    entries: Mapping[str, CkptEntry]
    source: ByteSource

    def slot(self, name: str) -> ByteRange | None:
        """Returns the tensor's place, which may be unaligned; ``None`` if encrypted or in several parts."""
        stored = self.entries[name]
        if len(stored.parts) != 1 or not isinstance(self.source, PlainFile):
            return None
        return ByteRange(stored.spec, *stored.parts[0])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes | memoryview:
        """Returns the bytes ``start`` up to ``stop`` of the tensor."""
        stop = file_bytes(self.entries[name].spec) if stop is None else stop
        pieces = []
        at = 0  # the offset in the tensor at which the part begins
        for a, b in self.entries[name].parts:
            first = max(start - at, 0)
            last = min(stop - at, b - a)
            if first < last:
                pieces.append(self.source.read(a + first, a + last))
            at += b - a
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """Yields all bytes of the tensor, in order, ``CHUNK`` at a time."""
        size = file_bytes(self.entries[name].spec)
        return (self.read(name, at, min(at + CHUNK, size)) for at in range(0, size, CHUNK))

    def blob(self, name: str) -> Blob:
        """Returns a copy of the full tensor.

        Raises ``ValueError`` for a dtype that a ``Blob`` cannot have.
        """
        spec = self.entries[name].spec
        try:
            return Blob.of(spec.dtype, spec.shape, bytearray(self.read(name)))
        except ValueError as error:
            raise ValueError(f"{self.path}: tensor {name}: {error}") from error

    def text(self, name: str) -> str:
        """Returns a string that was saved among the tensors."""
        try:
            return bytes(self.read(name)).decode("utf-32-le")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: string {name} is damaged: not UTF-32") from error


def open_ckpt(
    path: Path, key: bytes | None = None, mode: CipherMode = "AES-GCM", *, verify: bool = True
) -> Ckpt:
    """Opens a file and indexes its tensors.

    Only the heads of entries are read; with ``verify`` the full file is read once if it has a checksum.

    Raises ``ValueError``, naming the file and if possible the tensor, if it is not a ``.ckpt`` file, is
    truncated or damaged, or cannot be decrypted with ``key`` and ``mode``. Raises ``ModuleNotFoundError`` if
    it is encrypted and ``cryptography`` is not installed.
    """
    source = _source(path, key, mode)
    try:
        end = _body(source, verify)
        return Ckpt(path, _entries(source, end), source)
    except ValueError as error:
        if isinstance(source, EncryptedCkpt) and mode != "AES-GCM":
            raise source.refusal() from error  # CBC has no tag: a wrong key shows only in bad content
        if str(error).startswith(f"{path}: "):
            raise
        raise ValueError(f"{path}: {error}") from error


def _source(path: Path, key: bytes | None, mode: CipherMode) -> ByteSource:
    plain = PlainFile(path)
    if not plain.size:
        raise ValueError(f"{path}: not a MindSpore checkpoint: it is empty")

    # the file must be encrypted if a key was given, and must not be if none was
    file_mode = mode_of(plain.read(0, min(4, plain.size)))
    if key is not None:
        if file_mode is None:
            raise ValueError(f"{path}: a key was given, but the file is not encrypted; leave out dec_key")
        return EncryptedCkpt(path, key, mode)
    if file_mode is not None:
        raise ValueError(
            f"{path}: encrypted; read it with load_segmented_checkpoints, dec_key and "
            f'dec_mode="{file_mode}", and save the result in plain files for other uses'
        )
    return plain


def _body(source: ByteSource, verify: bool) -> int:
    """Returns the offset at which the tensors end.

    If ``verify`` and the file has a checksum, it is checked: raises ``ValueError`` if it is wrong.
    """
    end = source.size - len(CRC) - CRC_DIGITS
    if end < 0:
        return source.size
    trailer = bytes(source.read(end, source.size))
    if not trailer.startswith(CRC):
        return source.size

    if verify:
        crc = 0
        for at in range(0, end, CHUNK):
            crc = zlib.crc32(source.read(at, min(at + CHUNK, end)), crc)
        expected = int.from_bytes(trailer[len(CRC) :], "big")
        if crc != expected:
            raise ValueError(f"damaged: its CRC-32 is {crc:08x}, but {expected:08x} was saved")
    return end


@dataclass(frozen=True)
class _Part:
    name: str
    dims: tuple[int, ...]
    type: str
    start: int
    stop: int


def _entries(source: ByteSource, end: int) -> dict[str, CkptEntry]:
    """Returns the entries by name.

    A tensor in several parts has one entry per part in the file, each with the dims of the full tensor.
    """
    out: dict[str, CkptEntry] = {}
    run: list[_Part] = []
    for number, part in enumerate(_parts(source, end)):
        if number >= ENTRIES:
            raise ValueError(f"more than {ENTRIES} entries")

        # a new name begins a new tensor
        if run and run[0].name != part.name:
            out[run[0].name] = _joined(run)
            run = []
        if part.name in out:
            raise ValueError(f"tensor {shown(part.name)} is listed twice")
        run.append(part)
    if run:
        out[run[0].name] = _joined(run)
    return out


def _joined(run: list[_Part]) -> CkptEntry:
    first = run[0]
    if any((p.dims, p.type) != (first.dims, first.type) for p in run):
        raise ValueError(f"tensor {shown(first.name)}: its parts differ in shape or dtype")
    if first.type not in DTYPES:
        raise ValueError(
            f"tensor {shown(first.name)} has dtype {shown(first.type)}; supported: {', '.join(DTYPES)}"
        )
    if any(n < 0 for n in first.dims):
        raise ValueError(f"tensor {shown(first.name)} has a negative dim: {list(first.dims[:8])}")

    # it must have as many bytes as its shape needs
    size = sum(p.stop - p.start for p in run)
    spec = TensorSpec(_shape(first, size), DTYPES[first.type])
    if file_bytes(spec) != size:
        difference = f"it has {size} bytes, {described(spec)} needs {file_bytes(spec)}"
        raise ValueError(f"tensor {shown(first.name)} is truncated or damaged: {difference}")
    return CkptEntry(spec, tuple((p.start, p.stop) for p in run))


def _shape(part: _Part, size: int) -> tuple[int, ...]:
    if part.dims != (0,):
        return part.dims
    width = SIZES[DTYPES[part.type]]
    if part.type == TEXT:
        return (size // width,)
    return () if size == width else (0,)  # older versions wrote a scalar with one dim of 0


def _parts(source: ByteSource, end: int) -> Iterator[_Part]:
    at = 0
    while at < end:
        where = f"not a MindSpore checkpoint, or damaged, at byte {at}"
        try:
            # from here on an error names the tensor, if the name is not empty
            start, stop = _value(source, at, end)
            name = _name(source, start, end)
            if name:
                where = f"tensor {shown(name)}"

            if stop > end:
                raise ValueError(
                    f"truncated: its entry would end at byte {stop}, but the tensors end at {end}"
                )
            yield _part(source, name, start, stop)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        at = stop


def _value(source: ByteSource, at: int, end: int) -> tuple[int, int]:
    """Returns the byte range of the content of the entry that starts at ``at``; it may end after ``end``."""
    key, at = varint(source.read, at, end)
    if key != 1 << 3 | BYTES:
        raise ValueError("no entry of a tensor starts here")
    size, at = varint(source.read, at, end)
    return at, at + size


def _name(source: ByteSource, start: int, end: int) -> str:
    """Returns the entry's name. It comes first, so it can be read even if the rest is truncated."""
    key, at = varint(source.read, start, end)
    size, at = varint(source.read, at, end)
    if key != 1 << 3 | BYTES or size > min(NAME_LIMIT, end - at):
        raise ValueError("the entry does not start with a name")
    return utf8_text(bytes(source.read(at, at + size)))


def _part(source: ByteSource, name: str, start: int, stop: int) -> _Part:
    by_number = {field.number: field for field in _few(fields(source.read, start, stop))}
    if 3 in by_number:
        raise ValueError("a map tensor, which is not supported")
    if by_number.keys() != {1, 2} or by_number[2].kind != BYTES:
        raise ValueError("the entry is not a name and a tensor")

    # the tensor: its dims, its dtype, its bytes
    dims: list[int] = []
    rest: dict[int, Field] = {}
    for field in _few(fields(source.read, by_number[2].start, by_number[2].stop)):
        if field.number == 1:
            dims += islice(_dims(source, field), DIMS + 1)
        else:
            rest[field.number] = field
    if rest.keys() != {2, 3} or any(f.kind != BYTES for f in rest.values()):
        raise ValueError("its dtype or its content is missing")
    if len(dims) > DIMS:
        raise ValueError(f"it has more than {DIMS} dims")

    dtype = rest[2]
    if dtype.stop - dtype.start > NAME_LIMIT:
        raise ValueError("its dtype is not a name")
    kind = utf8_text(bytes(source.read(dtype.start, dtype.stop)))
    return _Part(name, tuple(dims), kind, start=rest[3].start, stop=rest[3].stop)


def _few(fields: Iterator[Field]) -> Iterator[Field]:
    for number, field in enumerate(fields):
        if number >= FIELDS:
            raise ValueError(f"more than {FIELDS} fields in one entry")
        yield field


def _dims(source: ByteSource, field: Field) -> Iterator[int]:
    if field.kind == VARINT:
        yield signed(field.value)
    at = field.start
    while at < field.stop:
        value, at = varint(source.read, at, field.stop)
        yield signed(value)


PART = 512 << 20  # the most bytes of a tensor in one entry


def write_ckpt(
    path: Path,
    specs: Mapping[str, TensorSpec],
    chunks: Callable[[str], Iterable[bytes | memoryview]],
    *,
    crc: bool = False,
    key: bytes | None = None,
    mode: CipherMode = "AES-GCM",
    part: int = PART,
) -> dict[str, str]:
    """Writes the tensors and syncs the file; returns the digest of each tensor (xxh3, 128 bits).

    The file is written in place: if writing fails, a partial file is left for the caller to delete.

    Args:
        path: The file.
        specs: The tensors, in the order to write. A string is a tensor of dtype ``str`` with one dim, its
            length.
        chunks: Returns a tensor's bytes, in order, or the ``text_bytes`` of a string. A chunk may be
            overwritten by the next one.
        crc: Add a checksum. MindSpore cannot read a file with both a checksum and encryption.
        key: The key to encrypt the file with; ``None`` writes a plain file.
        mode: The mode of encryption.
        part: The most bytes of a tensor in one entry.

    Raises:
        ValueError: ``crc`` and ``key`` are both given, or the format has no such dtype.
    """
    _check(specs, crc, key)

    # written under its final name: the caller deletes a partial file
    with named_errors(path, sum(map(file_bytes, specs.values()))):
        fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            sink: _File | CkptEncryptor = _File(fd) if key is None else CkptEncryptor(fd, key, mode)
            write = partial(_tensor, sink, part=part)
            digests = {name: write(name, spec, chunks(name)) for name, spec in specs.items()}

            # the checksum comes last and covers everything before it
            if crc:
                assert isinstance(sink, _File)
                sink.write(CRC + sink.crc.to_bytes(CRC_DIGITS, "big"))
            sink.close()
            os.fsync(fd)
        finally:
            os.close(fd)
    return digests


def text_bytes(text: str) -> bytes:
    return text.encode("utf-32-le")


def _check(specs: Mapping[str, TensorSpec], crc: bool, key: bytes | None) -> None:
    if crc and key is not None:
        raise ValueError("a checksum (crc) and encryption: MindSpore cannot read a file with both; use one")
    for name, spec in specs.items():
        if spec.dtype not in NAMES:
            raise ValueError(f"{name}: a .ckpt file cannot store {spec.dtype}; it stores {', '.join(NAMES)}")


class _File:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self.crc = 0

    def write(self, data: bytes | memoryview) -> None:
        write_at(self._fd, data, self._at)
        self._at += memoryview(data).nbytes
        self.crc = zlib.crc32(data, self.crc)

    def close(self) -> None:
        pass


def _tensor(
    sink: _File | CkptEncryptor,
    name: str,
    spec: TensorSpec,
    chunks: Iterable[bytes | memoryview],
    *,
    part: int,
) -> str:
    dims = (0,) if spec.dtype == TEXT else spec.shape
    description = numbers(1, dims) + packet(2, NAMES[spec.dtype].encode())
    sizes = _sizes(file_bytes(spec), part)

    # begin a new entry when the previous one is full
    digest = xxhash.xxh3_128()
    remaining = _entry(sink, name, description, next(sizes))
    for chunk in chunks:
        view = memoryview(chunk)
        digest.update(view)
        while view:
            remaining = remaining or _entry(sink, name, description, next(sizes))
            piece, view = view[:remaining], view[remaining:]
            sink.write(piece)
            remaining -= piece.nbytes
    assert remaining == sum(sizes) == 0, (name, remaining)
    return digest.hexdigest()


def _sizes(size: int, part: int) -> Iterator[int]:
    """Yields the sizes of a tensor's entries. A tensor without bytes has one entry too."""
    yield min(size, part)
    for at in range(part, size, part):
        yield min(part, size - at)


def _entry(sink: _File | CkptEncryptor, name: str, description: bytes, size: int) -> int:
    """Writes the head of an entry, up to its content; returns ``size``, the bytes of content that follow."""
    content = head(3, size)
    tensor = head(2, len(description) + len(content) + size) + description + content
    tag = packet(1, name.encode())
    sink.write(head(1, len(tag) + len(tensor) + size) + tag + tensor)
    return size
