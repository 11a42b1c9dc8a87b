"""Reads the indices of Megatron's token files."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from launcher.data.file_kinds import BadFile
from launcher.data.tokens.token_file import TokenFile
from launcher.untrusted.files import opened

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_FIELDS = struct.Struct("<9sQBQQ")
SIZES, POINTERS, DOCUMENTS = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<i8")
CHUNK = 1 << 20  # sequences checked at once
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
FLOATS = {6: "float64", 7: "float32"}


def token_file(path: Path, index: Path, size: int) -> TokenFile:
    """Describes the tokens of ``path``, which has ``size`` bytes, by its ``index``.

    Reads the index in bounded memory. Its sequences must cover the file without gaps, in order, as Megatron
    writes them. Raises ``BadFile`` and ``OSError``.
    """
    with opened(index) as file:
        dtype, sequences, documents = _header(file)
        if max(sequences, documents) > size + CHUNK:  # few sequences are empty
            raise BadFile(f"its .idx lists {sequences} sequences, but the .bin file has only {size} bytes")
        itemsize = np.dtype(dtype).itemsize
        at = 0
        for first in range(0, sequences, CHUNK):
            at = _chunk(file, first, sequences, itemsize=itemsize, at=at, size=size)
        if at != size:
            raise BadFile(f"it has {size} bytes, but its .idx says {at}")
        _documents(file, sequences, documents)
    return TokenFile(path, dtype, 0, size // itemsize)


def _header(file: BinaryIO) -> tuple[str, int, int]:
    """Returns the dtype and the numbers of sequences and of document ends. Raises ``BadFile``."""
    head = file.read(_FIELDS.size)
    if head[: len(MAGIC)] != MAGIC:
        raise BadFile("its .idx is not an index of Megatron: its first bytes differ")
    if len(head) < _FIELDS.size:
        raise BadFile("its .idx is cut off inside its header")
    _, version, code, sequences, documents = _FIELDS.unpack(head)
    if version != VERSION:
        raise BadFile(f"its .idx has version {version}; this launcher reads version {VERSION}")
    if code not in DTYPES:
        raise BadFile(
            f"its .idx says dtype {code} ({FLOATS.get(code, 'not known')}), which tokens cannot have"
        )

    size = os.fstat(file.fileno()).st_size
    need = _documents_at(sequences) + documents * DOCUMENTS.itemsize
    if size != need:
        counts = f"{sequences} sequences and {documents} document boundaries"
        raise BadFile(f"its .idx should have {need} bytes for {counts}, but has {size}")
    return DTYPES[code], sequences, documents


def _pointers_at(sequences: int) -> int:
    return _FIELDS.size + sequences * SIZES.itemsize


def _documents_at(sequences: int) -> int:
    return _pointers_at(sequences) + sequences * POINTERS.itemsize


def _chunk(file: BinaryIO, first: int, sequences: int, *, itemsize: int, at: int, size: int) -> int:
    """Checks ``CHUNK`` sequences from ``first`` on, which start at byte ``at``; returns where they end."""
    count = min(CHUNK, sequences - first)
    lengths = _numbers(file, _FIELDS.size + first * SIZES.itemsize, SIZES, count).astype(np.int64) * itemsize
    pointers = _numbers(file, _pointers_at(sequences) + first * POINTERS.itemsize, POINTERS, count)

    # each must be inside the file
    outside = (lengths < 0) | (pointers < 0) | (pointers > size - lengths)
    if outside.any():
        k = int(outside.argmax())
        text = f"sequence {first + k} of its .idx, {lengths[k]} bytes from byte {pointers[k]} on"
        raise BadFile(f"{text}, is outside the file, which has {size} bytes")

    # each must start where the one before it ends
    starts = at + np.cumsum(lengths) - lengths
    apart = pointers != starts
    if apart.any():
        k = int(apart.argmax())
        text = f"sequence {first + k} of its .idx starts at byte {pointers[k]}, the one before it ends at"
        raise BadFile(f"{text} byte {starts[k]}: sequences must be in order and without gaps")
    return int(starts[-1] + lengths[-1])


def _documents(file: BinaryIO, sequences: int, documents: int) -> None:
    """Checks that the ends of documents are sequence numbers in ascending order from 0 to ``sequences``."""
    last = 0
    for first, ends in _document_chunks(file, sequences, documents):
        if first == 0 and ends[0] != 0:
            raise BadFile(f"the first document of its .idx starts at sequence {ends[0]}, not 0")
        steps = np.diff(ends, prepend=last)
        if (steps < 0).any() or ends[-1] > sequences:
            raise BadFile(f"the documents of its .idx are out of order, or exceed its {sequences} sequences")
        last = int(ends[-1])
    if documents and last != sequences:
        raise BadFile(f"the last document of its .idx ends at sequence {last} of {sequences}")


def _document_chunks(
    file: BinaryIO, sequences: int, documents: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    for first in range(0, documents, CHUNK):
        at = _documents_at(sequences) + first * DOCUMENTS.itemsize
        yield first, _numbers(file, at, DOCUMENTS, min(CHUNK, documents - first))


def _numbers(file: BinaryIO, at: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    file.seek(at)
    return np.frombuffer(file.read(count * dtype.itemsize), dtype)
