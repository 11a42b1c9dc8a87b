"""Images as normalised float tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from launcher.data.shuffle import Indices
from launcher.data.source import Source


class Images(Source):
    """Converts bytes (samples, channels, height, width) to float32, in units of ``std`` from ``mean``.

    Both are for pixels in 0..1. Images are padded with black to ``size``, equally on all sides (an odd row or
    column goes below or to the right). A grey image fills all ``channels``.
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
