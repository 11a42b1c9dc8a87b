"""The header of a safetensors file, which lists the bytes of each tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from launcher.checkpoint.tensorfile.blob import CODES, DTYPES, described
from launcher.checkpoint.tensorfile.encryption import EncryptedFile, is_sealed
from launcher.plan.values.facts import ITEMSIZE, TensorSpec
from launcher.untrusted.files import DIMS, TEXT, brief, opened, parsed

LONGEST = TEXT  # the most bytes of a header
METADATA = "__metadata__"


@dataclass(frozen=True)
class Slot:
    """A tensor's place: bytes ``start`` up to ``stop``, counted from the beginning of the file."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A parsed header. ``entries`` are in file order; ``size`` is the file's, ``digest`` the header's."""

    entries: Mapping[str, Slot]
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
    if len(text) > LONGEST:
        raise ValueError(
            f"{len(text)} bytes of header for {len(specs)} tensors in one file; at most {LONGEST} are read"
        )
    head = len(text).to_bytes(8, "little") + text
    entries = {name: Slot(specs[name], len(head) + a, len(head) + b) for name, (a, b) in offsets.items()}
    return head, Header(entries, dict(metadata), len(head) + end, xxhash.xxh3_128_hexdigest(head))


def read_header(path: Path, key: bytes | None = None) -> Header:
    """Reads the header of a file.

    ``key`` decrypts an encrypted file; ``size`` of the header is then that of its plain text. Raises
    ``ValueError`` naming the file unless the tensors fill it exactly: without gap, overlap or truncation.
    """
    if key is not None:
        sealed = EncryptedFile(path, key)
        return _read(path, BytesIO(sealed.read(0, min(8, sealed.size))), sealed.size, sealed)
    with opened(path) as file:
        return _read(path, file, os.fstat(file.fileno()).st_size, None)


def _read(path: Path, file: BinaryIO, size: int, sealed: EncryptedFile | None) -> Header:
    head = file.read(8)
    if is_sealed(head):
        raise ValueError(
            f"{path}: it is encrypted: name the whole checkpoint, its manifest says where the key is"
        )
    if len(head) < 8:
        raise ValueError(f"{path}: truncated: a safetensors file has at least 8 bytes, this one {size}")

    # the header, which must fit into the file and into memory
    length = int.from_bytes(head, "little")
    if length > LONGEST:
        raise ValueError(
            f"{path}: not a safetensors file: its header claims {length} bytes, at most {LONGEST} are read"
        )
    if length > size - 8:
        raise ValueError(f"{path}: truncated: its header ends at byte {8 + length}, the file has {size}")
    text = file.read(length) if sealed is None else sealed.read(8, 8 + length)
    try:
        return _parse(text, head, size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse(text: bytes, head: bytes, size: int) -> Header:
    rows = _rows(text)
    metadata = rows.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{METADATA} is not a mapping of text to text")

    # the tensors must follow each other without a gap up to the end of the file
    base = len(head) + len(text)
    slots = {name: _slot(name, row, base) for name, row in rows.items()}
    entries = dict(sorted(slots.items(), key=lambda item: (item[1].start, item[1].stop)))
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


def _rows(text: bytes) -> dict[str, Any]:
    try:
        rows = parsed(text, unique=True)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError("not a safetensors file: its header is no JSON") from error
    if not isinstance(rows, dict):
        raise ValueError("not a safetensors file: its header is no mapping")
    return rows


def _slot(name: str, row: Any, base: int) -> Slot:
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name} needs dtype, shape and data_offsets")
    if not isinstance(row["dtype"], str) or row["dtype"] not in DTYPES:
        dtype = row["dtype"][:20] if isinstance(row["dtype"], str) else brief(row["dtype"])
        raise ValueError(f"tensor {name} has dtype {dtype}; known are {', '.join(DTYPES)}")
    if not _naturals(row["shape"]) or not _naturals(row["data_offsets"]) or len(row["data_offsets"]) != 2:
        raise ValueError(f"tensor {name} has shape {brief(row['shape'])} at {brief(row['data_offsets'])}")
    spec = TensorSpec(tuple(row["shape"]), DTYPES[row["dtype"]])
    start, stop = row["data_offsets"]
    if stop - start != spec.nbytes:
        raise ValueError(f"tensor {name} takes {stop - start} bytes, {described(spec)} needs {spec.nbytes}")
    return Slot(spec, base + start, base + stop)


def _naturals(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= DIMS
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
    )
