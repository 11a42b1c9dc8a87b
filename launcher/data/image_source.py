"""Images as samples, and the digits of ``data=mnist5k``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from launcher.data.mnist5k import read, where
from launcher.data.shuffle import Indices, permutation
from launcher.data.source import Dataset, Source, entropy
from launcher.job.schema.data import Mnist5k


class Images(Source):
    """Converts bytes (samples, channels, height, width) to float32, in units of ``std`` from ``mean``.

    ``mean`` and ``std`` are for pixels in 0..1. Images are padded with black to ``size``, equally on all
    sides (an odd row or column goes below or to the right). A gray image is repeated in all ``channels``.
    """

    def __init__(
        self, pixels: NDArray[np.uint8], labels: NDArray[Any], size: int, channels: int,
        mean: tuple[float, ...], std: tuple[float, ...],
    ) -> None:  # fmt: skip
        self.pixels, self.labels, self.size, self.channels = pixels, labels, size, channels
        self.mean = torch.tensor(mean, dtype=torch.float32, device="cpu").view(-1, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32, device="cpu").view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        x = torch.from_numpy(self.pixels[indices].astype(np.float32)) / 255
        down, right = (self.size - n for n in x.shape[-2:])
        x = F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
        x = (x - self.mean) / self.std
        return (x.expand(-1, self.channels, -1, -1).contiguous(),)

    def targets(self, indices: Indices) -> Tensor:
        return torch.from_numpy(self.labels[indices].astype(np.int64))


MEAN, STD = (0.1307,), (0.3081,)  # over all 60 000 training digits
SPLIT_SEED = 0  # not the job's: every run is validated on the same digits


def open_mnist5k(settings: Mnist5k) -> Dataset:
    file = where()
    assert file is not None, "checked before"
    pixels, labels = read(file)
    order = permutation(SPLIT_SEED, 0, len(labels))
    cut = len(labels) - round(len(labels) * settings.val_fraction)

    def source(part: Indices) -> Images:
        return Images(pixels[part], labels[part], settings.size, settings.channels, mean=MEAN, std=STD)

    val = source(order[cut:])
    return Dataset(source(order[:cut]), val, entropy(val))
