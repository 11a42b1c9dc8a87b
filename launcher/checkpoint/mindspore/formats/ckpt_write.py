"""Writes MindSpore ``.ckpt`` files as a stream."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import xxhash

from launcher.checkpoint.mindspore.formats.ckpt_read import CRC, CRC_DIGITS
from launcher.checkpoint.mindspore.formats.dtypes import NAMES, TEXT, nbytes
from launcher.checkpoint.mindspore.formats.encryption import CipherMode, CkptEncryptor, put
from launcher.checkpoint.mindspore.formats.wire import head, numbers, packet
from launcher.checkpoint.tensorfile.disk_space import told
from launcher.plan.values.facts import TensorSpec

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
        chunks: Returns a tensor's bytes, in order; the next chunk may overwrite a chunk. Those of a string
            are ``text_bytes``.
        crc: Add a checksum. MindSpore cannot read a file with both a checksum and encryption.
        key: The key to encrypt the file with; ``None`` writes a plain file.
        mode: The mode of encryption.
        part: The most bytes of a tensor in one entry.

    Raises:
        ValueError: ``crc`` and ``key`` are both given, or the format has no such dtype.
    """
    _check(specs, crc, key)

    # written under its final name: the caller deletes a partial file
    with told(path, sum(map(nbytes, specs.values()))):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
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
        raise ValueError(
            "a checksum (crc) and encryption: MindSpore cannot read a file with both; ask for one"
        )
    for name, spec in specs.items():
        if spec.dtype not in NAMES:
            raise ValueError(f"{name}: a .ckpt file has no dtype {spec.dtype}; it has {', '.join(NAMES)}")


class _File:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self.crc = 0

    def write(self, data: bytes | memoryview) -> None:
        put(self._fd, data, self._at)
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
    what = numbers(1, dims) + packet(2, NAMES[spec.dtype].encode())
    sizes = _sizes(nbytes(spec), part)

    # begin a new entry when the previous one is full
    digest = xxhash.xxh3_128()
    left = _entry(sink, name, what, next(sizes))
    for chunk in chunks:
        view = memoryview(chunk)
        digest.update(view)
        while view:
            left = left or _entry(sink, name, what, next(sizes))
            piece, view = view[:left], view[left:]
            sink.write(piece)
            left -= piece.nbytes
    assert left == sum(sizes) == 0, (name, left)
    return digest.hexdigest()


def _sizes(size: int, part: int) -> Iterator[int]:
    """Yields the sizes of a tensor's entries. A tensor without bytes has one entry too."""
    yield min(size, part)
    for at in range(part, size, part):
        yield min(part, size - at)


def _entry(sink: _File | CkptEncryptor, name: str, what: bytes, size: int) -> int:
    """Writes the head of an entry, up to its content; returns ``size``, the bytes of content that follow."""
    content = head(3, size)
    tensor = head(2, len(what) + len(content) + size) + what + content
    tag = packet(1, name.encode())
    sink.write(head(1, len(tag) + len(tensor) + size) + tag + tensor)
    return size
