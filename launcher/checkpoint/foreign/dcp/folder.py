"""Reads the full tensors of a DCP folder, however they were cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.checkpoint.chunked import gathered, slices
from launcher.checkpoint.foreign.dcp.metadata import NAME, Chunk, Contents, read_metadata
from launcher.checkpoint.foreign.dcp.torch_save import Saved, find
from launcher.checkpoint.layout.shards import whole
from launcher.checkpoint.tensorfile.blob import described
from launcher.checkpoint.tensorfile.header import Slot
from launcher.checkpoint.tensorfile.mmap_window import OPEN, Window
from launcher.checkpoint.tensorfile.safetensors import mapped
from launcher.plan.values.facts import ITEMSIZE, TensorSpec
from launcher.plan.values.layout import Box
from launcher.untrusted.files import irregular


class DcpFolder:
    """A DCP folder. ``specs`` are keyed by state-dict name; ``others`` are entries that are not tensors."""

    def __init__(self, folder: Path, contents: Contents) -> None:
        self.folder = folder
        self.others = contents.others
        self._tensors = contents.tensors
        self.specs: Mapping[str, TensorSpec] = {
            name: stored.spec for name, stored in contents.tensors.items()
        }
        self._map = lru_cache(maxsize=OPEN)(mapped)
        self._window = Window()
        self._saved = {
            name: [self._find(name, c) for c in stored.chunks] for name, stored in self._tensors.items()
        }

    def apart(self) -> DcpFolder:
        """Returns another object for the same folder, for use by another thread."""
        other = copy(self)
        other._window = Window()
        return other

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yields the bytes of the tensor, in order. All chunks share one buffer: use each before the next."""
        spec = self.specs[name]
        return gathered(whole(spec.shape), spec.dtype, lambda part, out: self.fill(name, part, out))

    def _find(self, name: str, chunk: Chunk) -> Saved:
        path = self.folder / chunk.file
        kind = irregular(path)
        if kind:
            raise ValueError(f"{path}: tensor {name} should be in it: {kind}")
        if not path.is_file():
            raise ValueError(f"{path}: tensor {name} should be in it, and it is not there")
        try:
            if not path.stat().st_size:
                raise ValueError("truncated: it is empty")
            saved = find(memoryview(self._map(path)), chunk.start, chunk.length)
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name}: {error}") from error

        want = TensorSpec(chunk.box.shape, self.specs[name].dtype)
        if saved.spec != want:
            told = f"{described(saved.spec)}, {NAME} says {described(want)}"
            raise ValueError(f"{path}: tensor {name}: its piece at {list(chunk.box.lo)} is {told}")
        return saved

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        """Copies ``part`` of the tensor into ``out``, an array of the form that ``words`` returns."""
        for chunk, saved in zip(self._tensors[name].chunks, self._saved[name], strict=True):
            both = chunk.box & part
            if not both:
                continue
            there = slices(both.within(chunk.box))
            here = out[slices(both.within(part))]

            # the window reads contiguous tensors only
            path = self.folder / chunk.file
            if saved.contiguous:
                slot = Slot(saved.spec, saved.start, saved.start + saved.spec.nbytes)
                self._window.copy(path, slot, there, here)
            else:
                kind = f"u{ITEMSIZE[saved.spec.dtype]}"
                tensor = np.ndarray(saved.spec.shape, kind, self._map(path), saved.start, saved.strides)
                here[...] = tensor[there]


def read_dcp(folder: Path) -> DcpFolder:
    """Opens a folder. The head of every tensor's chunk is read and checked.

    Raises ``ValueError`` naming the file and the tensor.
    """
    return DcpFolder(folder, read_metadata(folder))
