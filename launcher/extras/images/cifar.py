"""Reads CIFAR-10 in its python or binary form."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from launcher.data.image_source import Images
from launcher.data.source import Dataset, entropy
from launcher.extras.images.cifar_files import LONGEST, RECORD, Batches, find
from launcher.extras.images.cifar_pickles import Split, read_pickle
from launcher.job.schema.data import Cifar10
from launcher.untrusted.files import read_bytes

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # over the 50 000 training images


def read_binary(file: Path) -> Split:
    records = np.frombuffer(read_bytes(file, LONGEST), np.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def open_cifar10(settings: Cifar10) -> Dataset:
    batches = find(settings.root)
    assert batches is not None, "checked before"
    val = _source(batches, batches.test)
    return Dataset(_source(batches, batches.train), val, entropy(val))


def _source(batches: Batches, files: tuple[Path, ...]) -> Images:
    read = read_binary if batches.binary else read_pickle
    pixels, labels = zip(*map(read, files), strict=True)
    return Images(np.concatenate(pixels), np.concatenate(labels), size=32, channels=3, mean=MEAN, std=STD)
