"""Reads full tensors of a checkpoint, one box at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import numpy.typing as npt

from launcher.checkpoint.box_bytes import box_index, stream_box
from launcher.checkpoint.layout.shards import full_box
from launcher.checkpoint.tensorfile.mmap_window import Window
from launcher.checkpoint.tensorfile.safetensors import Blob
from launcher.plan.values.layout import Box
from launcher.plan.values.tensor_spec import TensorSpec


class FullTensors(Protocol):
    """A source of full tensors. ``specs`` lists every tensor by name."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        """Copies ``part`` of the tensor into ``out``, an array of the form that ``words`` returns."""


def chunks(source: FullTensors, name: str) -> Iterator[memoryview]:
    """Yields all bytes of the tensor, in order. All chunks share one buffer: use each before the next."""
    spec = source.specs[name]
    return stream_box(full_box(spec.shape), spec.dtype, partial(source.fill, name))


@dataclass(frozen=True)
class Blobs:
    """The tensors of a mapping, in memory or in mapped files."""

    blobs: Mapping[str, Blob]
    window: Window = field(default_factory=Window)

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: blob.spec for name, blob in self.blobs.items()}

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        self.window.take(self.blobs[name], box_index(part), out)


@dataclass(frozen=True)
class RenamedTensors:
    """Some tensors of ``source`` under new names; ``names`` maps each new name to the name in ``source``."""

    source: FullTensors
    names: Mapping[str, str]

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: self.source.specs[old] for name, old in self.names.items()}

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        self.source.fill(self.names[name], part, out)
