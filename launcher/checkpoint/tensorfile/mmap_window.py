"""Reads memory-mapped files while only a bounded part of them is resident."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.checkpoint.tensorfile.encryption import EncryptedFile
from launcher.checkpoint.tensorfile.safetensors import CHUNK, Blob, ByteRange, mapped, words

OPEN = 128  # files mapped at once
OPEN_ENCRYPTED = 4  # encrypted files open at once; each keeps a few decrypted blocks in memory


class Window:
    """Reads many files of any size and keeps about ``2 * CHUNK`` bytes of them resident in this process."""

    def __init__(self, key: bytes | None = None) -> None:
        """``key``: the key of encrypted files. Decrypted bytes stay in memory until they are copied."""
        self._encrypted = None if key is None else lru_cache(maxsize=OPEN_ENCRYPTED)(partial(_encrypted, key))
        self._map = lru_cache(maxsize=OPEN)(mapped)
        self._touched: dict[int, mmap.mmap] = {}
        self._resident = 0

    def copy(
        self, path: Path, slot: ByteRange, where: tuple[slice | EllipsisType, ...], out: npt.NDArray[Any]
    ) -> None:
        """Copies ``tensor[where]`` to ``out``, an array of the form that ``words`` returns."""
        if self._encrypted is not None:
            _copy_encrypted(self._encrypted(path), slot, where, out)
            return
        data = self._map(path)
        self._paced(data, words(data, slot.spec, slot.start)[where], out)

    def take(self, blob: Blob, where: tuple[slice | EllipsisType, ...], out: npt.NDArray[Any]) -> None:
        """Copies as ``copy`` does, from a tensor in memory or in a mapped file."""
        owner = blob.data.obj
        file = owner if isinstance(owner, mmap.mmap) else None
        if not blob.data.readonly:
            file = None  # its pages may have been modified, so they must not be dropped
        self._paced(file, words(blob.data, blob.spec)[where], out)

    def chunks(self, path: Path, slot: ByteRange) -> Iterator[memoryview]:
        """Yields the bytes of a tensor, in order. A chunk is valid until the next one."""
        if self._encrypted is not None:
            for at in range(slot.start, slot.stop, CHUNK):
                yield memoryview(self._encrypted(path).read(at, min(at + CHUNK, slot.stop)))
            return
        data = self._map(path)
        view = memoryview(data)
        for at in range(slot.start, slot.stop, CHUNK):
            chunk = view[at : min(at + CHUNK, slot.stop)]
            yield chunk
            self._used(data, chunk.nbytes)

    def _paced(self, data: mmap.mmap | None, src: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Copies ``src`` to ``out``.

        A part that spans more than ``CHUNK`` bytes of the file, gaps included, is halved first.
        """
        if not src.size:
            return
        span = sum((n - 1) * stride for n, stride in zip(src.shape, src.strides, strict=True)) + src.itemsize
        if span <= CHUNK:
            out[...] = src
            self._used(data, span)
            return
        dim = next(d for d, n in enumerate(src.shape) if n > 1)
        half = src.shape[dim] // 2
        for piece in (slice(None, half), slice(half, None)):
            at = (*(slice(None) for _ in range(dim)), piece)
            self._paced(data, src[at], out[at])

    def _used(self, data: mmap.mmap | None, nbytes: int) -> None:
        if data is None:
            return
        self._touched[id(data)] = data
        self._resident += nbytes
        if self._resident >= CHUNK:
            for file in self._touched.values():
                file.madvise(mmap.MADV_DONTNEED)  # drops the pages from this process, not from the page cache
            self._touched.clear()
            self._resident = 0


def _encrypted(key: bytes, path: Path) -> EncryptedFile:
    return EncryptedFile(path, key)


def _copy_encrypted(
    file: EncryptedFile, slot: ByteRange, where: tuple[slice | EllipsisType, ...], out: npt.NDArray[Any]
) -> None:
    """Copies as ``Window.copy`` does, from an encrypted file.

    It decrypts the range of bytes that contains ``where``, gaps included. A part that spans more than
    ``CHUNK`` bytes is halved first.
    """
    steps = strides(slot.spec.shape, out.itemsize)
    cuts = [cut for cut in where if isinstance(cut, slice)]
    first = sum(cut.start * step for cut, step in zip(cuts, steps, strict=True))
    _stretch(file, slot.start + first, steps, out)


def strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the strides in bytes of a contiguous tensor."""
    if not shape:
        return ()
    return tuple(int(n) for n in np.cumprod([itemsize, *reversed(shape[1:])])[::-1])


def _stretch(file: EncryptedFile, at: int, steps: tuple[int, ...], out: npt.NDArray[Any]) -> None:
    if not out.size:
        return
    span = sum((n - 1) * step for n, step in zip(out.shape, steps, strict=True)) + out.itemsize
    if span <= CHUNK:
        out[...] = np.ndarray(out.shape, out.dtype, file.read(at, at + span), strides=steps)
        return
    dim = next(d for d, n in enumerate(out.shape) if n > 1)
    half = out.shape[dim] // 2
    parts = [(slice(None),) * dim + (piece,) for piece in (slice(None, half), slice(half, None))]
    _stretch(file, at, steps, out[parts[0]])
    _stretch(file, at + half * steps[dim], steps, out[parts[1]])
