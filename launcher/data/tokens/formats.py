"""Reads token files of launcher, nanoGPT and llm.c, and writes ours."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from launcher.data.file_kinds import BadFile, kind_by_start
from launcher.data.tokens import megatron
from launcher.data.tokens.token_file import TokenFile
from launcher.errors import RunError
from launcher.untrusted.files import opened

HEADER = 256 * 4  # bytes: 256 numbers of int32
FORMS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""The version (the header's second number) and the dtype, by the header's first number."""
ITEMSIZE = {"uint16": 2, "uint32": 4}
LEAST = 64  # the fewest tokens that show a wider dtype
UPPER = 3  # the upper bytes of tokens below 2**18, the size of the largest vocabularies


def has_header(start: bytes) -> bool:
    return len(start) >= 4 and int.from_bytes(start[:4], "little") in FORMS


def with_header(path: Path, start: bytes, size: int) -> TokenFile:
    """Reads the header of an llm.c file. Raises ``BadFile``."""
    if len(start) < HEADER:
        raise BadFile(f"cut off inside its header of {HEADER} bytes")
    magic, version, tokens = struct.unpack_from("<3i", start)
    known, dtype = FORMS[magic]
    if version != known:
        raise BadFile(f"version {version} of llm.c files with {magic}; this launcher reads version {known}")
    need = HEADER + tokens * ITEMSIZE[dtype]
    if tokens < 0 or size != need:
        raise BadFile(f"its header promises {tokens} tokens of {dtype}, {need} bytes in all; it has {size}")
    return TokenFile(path, dtype, HEADER, tokens)


def _wider(start: bytes, size: int, dtype: str) -> str:
    """Returns the wider dtype that ``start`` has if all upper bytes are near 0; "" if it has ``dtype``.

    Read as ``dtype``, every second token would be 0, and no error would say so.
    """
    for wide in ("int64", "uint32"):
        width = np.dtype(wide).itemsize
        usable = len(start) // width * width
        if width <= ITEMSIZE[dtype] or size % width or usable < LEAST * width:
            continue
        parts = np.frombuffer(start[:usable], f"<u{ITEMSIZE[dtype]}").reshape(-1, width // ITEMSIZE[dtype])
        if parts[:, 1:].max() <= UPPER < parts[:, 0].max():
            return wide
    return ""


def without_header(path: Path, start: bytes, size: int, dtype: str) -> TokenFile:
    """Describes a file of nanoGPT, which has no header; ``start`` is its beginning. Raises ``BadFile``."""
    if size % ITEMSIZE[dtype]:
        raise BadFile(f"{size} bytes are not a whole number of tokens of data.dtype={dtype}")
    if wide := _wider(start, size, dtype):
        way = f"data.dtype={wide} reads them" if wide in ITEMSIZE else "write them as uint16 or uint32"
        raise BadFile(f"its tokens are {wide}: read as data.dtype={dtype}, every second one is near 0; {way}")
    return TokenFile(path, dtype, 0, size // ITEMSIZE[dtype])


MAGIC = b"\x89TOKENS\n"  # the first byte is invalid in UTF-8, so no text starts like this
VERSION = 1
DTYPES = {2: "uint16", 4: "uint32"}
"""The dtype of tokens, by their bytes."""
_FIELDS = struct.Struct("<8sIIQQq16s")
_DIGEST = 8  # bytes; xxh3 (64 bits) of the fields, stored after them
HEADER_SIZE = _FIELDS.size + _DIGEST
NO_END = -1  # stored if no token ends documents


@dataclass(frozen=True)
class TokenHeader:
    """A header. ``itemsize`` is in bytes; ``digest`` is the xxh3 (128 bits) of the bytes of all tokens."""

    itemsize: int
    tokens: int
    vocab_size: int
    end_of_document: int | None
    digest: bytes

    def packed(self) -> bytes:
        end = NO_END if self.end_of_document is None else self.end_of_document
        numbers = (self.itemsize, self.tokens, self.vocab_size, end)
        fields = _FIELDS.pack(MAGIC, VERSION, *numbers, self.digest)
        return fields + xxhash.xxh3_64_digest(fields)


def parsed(data: bytes) -> TokenHeader:
    """Parses the first bytes of a file. Raises ``BadFile``."""
    if data[: len(MAGIC)] != MAGIC:
        raise BadFile("not a .tokens file: its first bytes differ")
    if len(data) < HEADER_SIZE:
        raise BadFile(f"cut off inside its header of {HEADER_SIZE} bytes")
    fields, digest = data[: _FIELDS.size], data[_FIELDS.size : HEADER_SIZE]
    _, version, itemsize, tokens, vocab_size, end, payload = _FIELDS.unpack(fields)
    if version != VERSION:
        raise BadFile(f"version {version} of .tokens files; this launcher reads version {VERSION}")
    if xxhash.xxh3_64_digest(fields) != digest:
        raise BadFile("its header is damaged: its digest does not match")

    # a header with the right digest may still be invalid
    if itemsize not in DTYPES:
        raise BadFile(f"tokens of {itemsize} bytes; only 2 and 4 are possible")
    if not 1 <= vocab_size <= 256**itemsize:
        raise BadFile(f"vocab_size {vocab_size} does not fit tokens of {itemsize} bytes")
    if not NO_END <= end < vocab_size:
        raise BadFile(f"token {end} ends documents, but vocab_size is {vocab_size}")
    return TokenHeader(itemsize, tokens, vocab_size, None if end == NO_END else end, payload)


def own_token_file(path: Path, start: bytes, size: int) -> TokenFile:
    """Describes a .tokens file of ``size`` bytes that begins with ``start``. Raises ``BadFile``."""
    head = parsed(start)
    need = HEADER_SIZE + head.tokens * head.itemsize
    if size != need:
        text = f"its header promises {head.tokens} tokens, {need} bytes with the header"
        raise BadFile(f"{'cut off' if size < need else 'too long'}: {text}; it has {size}")
    dtype, digest = DTYPES[head.itemsize], head.digest.hex()
    return TokenFile(path, dtype, HEADER_SIZE, head.tokens, head.vocab_size, digest, head.end_of_document)


OPEN = 128  # files mapped at once: each uses a descriptor, and many systems allow 1024 per process
CHUNK = 8 << 20  # bytes digested at once
READ = ".tokens, .bin (nanoGPT, llm.c) and .bin with .idx (Megatron) are read"


def token_file(path: Path, dtype: str) -> TokenFile:
    """Checks the header and the size of a file, not the tokens. ``dtype`` is for files that do not store it.

    Raises ``BadFile`` and ``OSError``.
    """
    with opened(path) as stream:
        start = stream.read(HEADER)
        size = os.fstat(stream.fileno()).st_size
    if not size:
        raise BadFile("the file is empty")

    if path.suffix == ".tokens" or start.startswith(MAGIC):
        return own_token_file(path, start, size)
    if path.suffix != ".bin":
        raise BadFile(f"not a file of tokens by its name: {READ}")
    index = path.with_suffix(".idx")
    if os.path.lexists(index):
        return megatron.token_file(path, index, size)
    if has_header(start):
        return with_header(path, start, size)

    # two bytes that match a signature could be a token
    kind = kind_by_start(start, least=4)
    if kind is not None:
        raise BadFile(f"{kind.kind} by its first bytes, not tokens alone: {READ}")
    return without_header(path, start, size, dtype)


@lru_cache(maxsize=OPEN)
def mapped(file: TokenFile) -> NDArray[Any]:
    """Returns all tokens of a file, memory-mapped. Each process opens the file on first use.

    Raises ``RunError`` if the file was truncated after it was checked.
    """
    dtype = np.dtype(file.dtype).newbyteorder("<")
    if not file.tokens:
        return np.zeros(0, dtype)  # an empty array cannot be mapped
    try:
        with opened(file.path) as stream:
            return np.memmap(stream, dtype, mode="r", offset=file.offset, shape=(file.tokens,))
    except (OSError, ValueError) as error:
        raise RunError(f"{file.path}: cannot be read any more: {error}") from error


def window(file: TokenFile, start: int, stop: int, vocab_size: int) -> NDArray[Any]:
    """Returns tokens ``[start, stop)``. Raises ``RunError`` if one is not from 0 to ``vocab_size - 1``."""
    tokens = mapped(file)[start:stop]
    wrong = tokens >= vocab_size
    if tokens.dtype.kind == "i":
        wrong |= tokens < 0
    if wrong.any():
        k = int(wrong.argmax())
        text = f"token {start + k} is {tokens[k]}, which is not between 0 and {vocab_size - 1}"
        raise RunError(f"{file.path}: {text}: data.vocab_size is {vocab_size}")
    return tokens


def check_digest(file: TokenFile) -> None:
    """Reads all tokens, in bounded memory. Raises ``BadFile`` if they do not match the digest.

    Files of a format without digests always pass.
    """
    if file.digest is None:
        return
    digest = xxhash.xxh3_128()
    remaining = file.tokens * np.dtype(file.dtype).itemsize
    with opened(file.path) as stream:
        stream.seek(file.offset)
        while remaining and (chunk := stream.read(min(CHUNK, remaining))):
            digest.update(chunk)
            remaining -= len(chunk)
    if digest.hexdigest() != file.digest:
        raise BadFile("damaged: the digest of its tokens does not match its header")


WRITE_CHUNK = 1 << 20  # tokens converted at once


class TokenWriter:
    """Writes a file, which appears only when the ``with`` block ends without error and all of it is on disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TokenWriter(Path(folder, "a.tokens"), vocab_size=50257, end_of_document=50256) as file:
    ...         file.append([15496, 995, 50256])
    ...     Path(folder, "a.tokens").stat().st_size
    70
    """

    def __init__(self, path: Path, vocab_size: int, end_of_document: int | None = None) -> None:
        """Tokens take two bytes if ``vocab_size`` is at most 65536, otherwise four. Raises ``ValueError``."""
        self.itemsize = 2 if vocab_size <= 1 << 16 else 4
        if not 1 <= vocab_size <= 256**self.itemsize:
            raise ValueError(f"vocab_size={vocab_size} is not between 1 and {256**4}")
        if end_of_document is not None and not 0 <= end_of_document < vocab_size:
            raise ValueError(f"end_of_document={end_of_document} is not below vocab_size={vocab_size}")
        self.path, self.vocab_size, self.end_of_document = path, vocab_size, end_of_document
        self.tokens = 0
        self._digest = xxhash.xxh3_128()
        self._new = path.with_name(f".{path.name}.{os.getpid()}")
        self._file = self._new.open("wb")
        self._file.write(bytes(HEADER_SIZE))  # the header is known at the end

    def append(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Appends tokens. If one is not below ``vocab_size``, raises ``ValueError`` and writes none."""
        array = np.asarray(tokens)
        if not array.size:
            return
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(
                f"tokens must be whole numbers in one row, not {array.dtype} {list(array.shape)}"
            )
        wrong = (array < 0) | (array >= self.vocab_size)
        if wrong.any():
            k = int(wrong.argmax())
            text = f"token {self.tokens + k} is {array[k]}"
            raise ValueError(f"{self.path}: {text}, which is not between 0 and {self.vocab_size - 1}")

        dtype = np.dtype(DTYPES[self.itemsize]).newbyteorder("<")
        for at in range(0, len(array), WRITE_CHUNK):
            data = array[at : at + WRITE_CHUNK].astype(dtype).tobytes()
            self._digest.update(data)
            self._file.write(data)
        self.tokens += len(array)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            with self._file as file:
                if kind is None:
                    file.seek(0)
                    file.write(self._header().packed())
                    file.flush()
                    os.fsync(file.fileno())
            if kind is None:
                self._new.replace(self.path)
                sync(self.path.parent)
        finally:
            self._new.unlink(missing_ok=True)

    def _header(self) -> TokenHeader:
        digest = self._digest.digest()
        return TokenHeader(self.itemsize, self.tokens, self.vocab_size, self.end_of_document, digest)


def sync(folder: Path) -> None:
    """Syncs the names in ``folder`` to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
