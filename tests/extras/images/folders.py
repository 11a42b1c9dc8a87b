"""Folders of small images whose pixels are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 6
CLASSES = ("cat", "dog", "owl")
Known = list[tuple[np.ndarray, int]]


def write(root: Path, each: int = 4, side: int = SIDE, seed: int = 0, suffix: str = ".png") -> Known:
    """Write ``each`` images per class.

    Returns the pixels (height, width, 3) and the class of each image, in the order of their names.
    """
    rng, out = np.random.default_rng(seed), []
    for number, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for i in range(each):
            pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:03}{suffix}", quality=95)
            out.append((pixels, number))
    return out
