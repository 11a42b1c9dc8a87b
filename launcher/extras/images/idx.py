"""Opens data sets in idx form, such as MNIST and Fashion-MNIST."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.data.image_source import Images
from launcher.data.source import Dataset, entropy
from launcher.extras.images.idx_files import TEST, TRAIN, find, header, inflated, offset
from launcher.job.schema.data import Idx
from launcher.untrusted.files import opened

MEAN, STD = (0.5,), (0.5,)  # for images of any kind: pixels in -1..1


def read(file: Path) -> NDArray[np.uint8]:
    """Reads the array; a plain file is memory-mapped."""
    shape = header(file)
    if file.suffix != ".gz":
        with opened(file) as stream:
            return np.memmap(stream, np.uint8, mode="r", offset=offset(shape), shape=shape)
    with opened(file) as stream:
        data = inflated(stream).read(offset(shape) + prod(shape))
    return np.frombuffer(data, np.uint8, count=prod(shape), offset=offset(shape)).reshape(shape)


def open_idx(settings: Idx) -> Dataset:
    def source(names: tuple[str, str]) -> Images:
        pixels, labels = (read(file) for name in names if (file := find(settings.root, name)))
        return Images(pixels[:, None], labels, settings.size, settings.channels, mean=MEAN, std=STD)

    val = source(TEST)
    return Dataset(source(TRAIN), val, entropy(val))
