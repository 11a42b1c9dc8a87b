"""Opens the 5000 MNIST digits, some of which are for validation."""

from __future__ import annotations

from launcher.data.files.mnist5k import read, where
from launcher.data.images.image_source import Images
from launcher.data.shuffle import Indices, permutation
from launcher.data.source import Dataset, entropy
from launcher.job.schema.components import Mnist5k

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
