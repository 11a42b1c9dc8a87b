"""Reads the file of ``data=text``, and splits it into training and validation parts."""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.job.schema.data import Text
from launcher.untrusted.files import opened

SHIPPED = Path(__file__).parent / "text" / "shakespeare.txt"


def where(settings: Text) -> Path:
    """Returns the file to read; by default, the text that ships with launcher."""
    return SHIPPED if settings.path is None else Path(settings.path)


def split(settings: Text) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns the training and validation bytes, memory-mapped. No UTF-8 character is split.

    A byte order mark at the start of the file is left out, as in ``prepare``.
    """
    with opened(where(settings)) as file:
        data: NDArray[np.uint8] = np.memmap(file, np.uint8, mode="r")
    if data[: len(BOM_UTF8)].tobytes() == BOM_UTF8:
        data = data[len(BOM_UTF8) :]
    at = len(data) - round(len(data) * settings.val_fraction)
    for _ in range(3):  # a character has three continuation bytes at most
        if at < len(data) and data[at] & 0xC0 == 0x80:
            at += 1
    return data[:at], data[at:]
