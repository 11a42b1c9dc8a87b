"""Random changes of an image: a pure function of (seed, epoch, image)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""An array of shape (height, width, channels)."""


@dataclass(frozen=True)
class Augmentation:
    """``RandomCrop(crop, padding)``, then ``RandomHorizontalFlip(flip)``, as MindSpore has them."""

    crop: int | None
    padding: int
    flip: float

    def __bool__(self) -> bool:
        return self.crop is not None or self.flip > 0

    def __call__(self, pixels: Pixels, seed: int, epoch: int, number: int) -> Pixels:
        """``number`` counts the images, whoever reads them and in whatever order."""
        # raw numbers of Philox, which numpy promises never to change
        stream = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch, number)))
        top, left, coin = stream.random_raw(3).tolist()
        if self.crop is not None:
            pixels = self._cropped(pixels, top, left)
        if coin < self.flip * 2**64:
            pixels = pixels[:, ::-1]
        return np.ascontiguousarray(pixels)

    def _cropped(self, pixels: Pixels, top: int, left: int) -> Pixels:
        """Black around it, and of that a square; every place is as likely."""
        assert self.crop is not None
        around = (self.padding, self.padding)
        pixels = np.pad(pixels, (around, around, (0, 0)))
        down, right = (n - self.crop + 1 for n in pixels.shape[:2])
        top, left = top % down, left % right
        return pixels[top : top + self.crop, left : left + self.crop]
