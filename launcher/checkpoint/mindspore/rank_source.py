"""Reads one rank's file that another program wrote: safetensors, or MindSpore's ``.ckpt``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from launcher.checkpoint.chunked import slices
from launcher.checkpoint.mindspore.formats.ckpt_read import Ckpt, open_ckpt
from launcher.checkpoint.mindspore.formats.dtypes import TEXT
from launcher.checkpoint.mindspore.formats.encryption import CipherMode
from launcher.checkpoint.tensorfile.header import read_header
from launcher.checkpoint.tensorfile.mmap_window import Window, strides
from launcher.checkpoint.tensorfile.safetensors import CHUNK, blob_at, mapped, sliced
from launcher.plan.values.facts import ITEMSIZE, TensorSpec
from launcher.plan.values.layout import Box

SUFFIXES = (".safetensors", ".ckpt")


class RankSource(Protocol):
    """One rank's file. ``specs`` lists every tensor, ``texts`` the strings that were saved among them."""

    @property
    def path(self) -> Path: ...
    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...
    @property
    def texts(self) -> Mapping[str, str]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...

    def fill(self, window: Window, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        """Copies ``part`` of the tensor into ``out``, an array of the form that ``words`` returns."""

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """Yields all bytes of the tensor, in order."""


def open_source(
    path: Path, key: bytes | None = None, mode: CipherMode = "AES-GCM", *, verify: bool = True
) -> RankSource:
    """Opens a file and reads its header; with ``verify`` also checks a ``.ckpt``'s checksum, if it has one.

    The checksum requires reading the whole file. ``key`` and ``mode`` decrypt a ``.ckpt``. Raises
    ``ValueError``.
    """
    if path.suffix == ".ckpt":
        return _Ckpt(open_ckpt(path, key, mode, verify=verify))
    return _Safetensors(path)


class _Safetensors:
    texts: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = read_header(path)
        self.specs = {name: slot.spec for name, slot in self._header.entries.items()}
        self.metadata = self._header.metadata

    def fill(self, window: Window, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        window.copy(self.path, self._header.entries[name], slices(part), out)

    def chunks(self, name: str) -> Iterator[memoryview]:
        return sliced(blob_at(mapped(self.path), self._header, name).data)


class _Ckpt:
    metadata: Mapping[str, str] = {}

    def __init__(self, file: Ckpt) -> None:
        self.path = file.path
        self._file = file
        self.specs = {name: stored.spec for name, stored in file.entries.items() if stored.spec.dtype != TEXT}
        self.texts = {
            name: file.text(name) for name, stored in file.entries.items() if stored.spec.dtype == TEXT
        }
        unknown = sorted({s.dtype for s in self.specs.values()} - ITEMSIZE.keys())
        if unknown:
            raise ValueError(
                f"{self.path}: tensors of dtype {', '.join(unknown)}, which has no place elsewhere"
            )

    def fill(self, window: Window, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        slot = self._file.slot(name)
        if slot is not None:
            window.copy(self.path, slot, slices(part), out)
        else:
            self._gather(name, part, out)

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        return self._file.chunks(name)

    def _gather(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        """Copies ``part`` of a tensor that is encrypted or stored in pieces into ``out``.

        It reads the byte range that contains ``part``; if the range is long, it splits ``part`` in halves.
        """
        if part.empty:
            return

        # the byte range from the first element of the part to its last
        spec = self.specs[name]
        size = ITEMSIZE[spec.dtype]
        steps = strides(spec.shape, size)
        start = sum(lo * step for lo, step in zip(part.lo, steps, strict=True))
        span = sum((n - 1) * step for n, step in zip(part.shape, steps, strict=True)) + size
        dim = next((d for d, n in enumerate(part.shape) if n > 1), None)
        if span <= CHUNK or dim is None:
            data = self._file.read(name, start, start + span)
            out[...] = np.ndarray(part.shape, f"u{size}", data, strides=steps)
            return

        half = part.lo[dim] + part.shape[dim] // 2
        below = Box(part.lo, (*part.hi[:dim], half, *part.hi[dim + 1 :]))
        above = Box((*part.lo[:dim], half, *part.lo[dim + 1 :]), part.hi)
        for piece in (below, above):
            self._gather(name, piece, out[slices(piece.within(part))])
