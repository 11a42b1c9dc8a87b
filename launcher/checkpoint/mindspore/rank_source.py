"""One rank's file as others write it: safetensors, or MindSpore's ``.ckpt``."""

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
from launcher.checkpoint.tensorfile.mmap_window import Window
from launcher.checkpoint.tensorfile.safetensors import CHUNK, blob_at, mapped, sliced
from launcher.plan.values.facts import ITEMSIZE, TensorSpec
from launcher.plan.values.layout import Box

SUFFIXES = (".safetensors", ".ckpt")


class RankSource(Protocol):
    """``specs`` has every tensor, ``texts`` the strings that were saved among them."""

    @property
    def path(self) -> Path: ...
    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...
    @property
    def texts(self) -> Mapping[str, str]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...

    def fill(self, window: Window, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        """Put ``part`` of the tensor into ``out``, which is as ``words`` makes it."""

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """All bytes of the tensor, in order."""


def open_source(
    path: Path, key: bytes | None = None, mode: CipherMode = "AES-GCM", *, verify: bool = True
) -> RankSource:
    """Heads are read, and with ``verify`` of a ``.ckpt`` with a checksum everything.

    Raises ``ValueError``.
    """
    return _Ckpt(open_ckpt(path, key, mode, verify=verify)) if path.suffix == ".ckpt" else _Safetensors(path)


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
        self.path, self._file = file.path, file
        self.specs = {name: stored.spec for name, stored in file.entries.items() if stored.spec.dtype != TEXT}
        self.texts = {
            name: file.text(name) for name, stored in file.entries.items() if stored.spec.dtype == TEXT
        }
        if strange := {s.dtype for s in self.specs.values()} - ITEMSIZE.keys():
            raise ValueError(
                f"{self.path}: tensors of dtype {', '.join(sorted(strange))}, which has no place elsewhere"
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
        """Of a tensor that is encrypted or in pieces: read the stretch around ``part``, in halves if long."""
        spec = self.specs[name]
        size = ITEMSIZE[spec.dtype]
        strides = tuple(int(n) for n in np.cumprod([size, *spec.shape[:0:-1]])[::-1]) if spec.shape else ()
        start = sum(lo * stride for lo, stride in zip(part.lo, strides, strict=True))
        span = sum((n - 1) * stride for n, stride in zip(part.shape, strides, strict=True)) + size
        if part.empty:
            return
        dim = next((d for d, n in enumerate(part.shape) if n > 1), None)
        if span <= CHUNK or dim is None:
            data = self._file.read(name, start, start + span)
            out[...] = np.ndarray(part.shape, f"u{size}", data, 0, strides)
            return
        half = part.lo[dim] + part.shape[dim] // 2
        cut = (*part.hi[:dim], half, *part.hi[dim + 1 :]), (*part.lo[:dim], half, *part.lo[dim + 1 :])
        for piece in (Box(part.lo, cut[0]), Box(cut[1], part.hi)):
            self._gather(name, piece, out[slices(piece.within(part))])
