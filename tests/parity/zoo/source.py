"""The zoo's samples as a data set that a job can name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from launcher.data.shuffle import Indices
from launcher.data.source import Source
from tests.parity.zoo import samples
from tests.parity.zoo.layouts import SAMPLES


class Samples(Source):
    """A data set of three batches, so that no two steps are equal."""

    def __init__(self, shapes: list[Any], classes: int, target: list[int], ignored: bool, split: str) -> None:
        self.shapes, self.classes, self.target, self.ignored = shapes, classes, target, ignored

    def __len__(self) -> int:
        return SAMPLES

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return samples.inputs(self.shapes, indices.tolist())

    def targets(self, indices: Indices) -> Tensor:
        return samples.targets(self.target, self.classes, self.ignored, indices.tolist())
