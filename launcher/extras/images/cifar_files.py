"""Finds and checks the batch files of CIFAR-10, in their python or binary form."""

from __future__ import annotations

import os
import pickle
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.data.file_kinds import BadFile
from launcher.errors import Problem
from launcher.job.schema.data import Cifar10
from launcher.untrusted.files import irregular, opened, read_bytes, stands

RECORD = 1 + 3 * 32 * 32
LONGEST = 64 << 20  # the most bytes of a batch; the published batches have half as many
FORMS = (("", "cifar-10-batches-py"), (".bin", "cifar-10-batches-bin"))
NAMES = (
    "numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct", "numpy ndarray",
    "numpy dtype", "_codecs encode",
)  # fmt: skip
"""The names that a pickle of arrays may refer to."""
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = ("test_batch",)


@dataclass(frozen=True)
class Batches:
    """The files of a data set: if ``binary``, records of a label and 3072 pixels; otherwise pickles."""

    binary: bool
    train: tuple[Path, ...]
    test: tuple[Path, ...]


def find(root: str) -> Batches | None:
    """Finds the batches in ``root``, or in the folder that the archive unpacks to inside it.

    Returns the first form that has at least one of its files.
    """
    for suffix, folder in FORMS:
        for base in (Path(root), Path(root, folder)):
            train, test = (tuple(base / f"{name}{suffix}" for name in names) for names in (TRAIN, TEST))
            if any(stands(f) for f in (*train, *test)):
                return Batches(suffix == ".bin", train, test)
    return None


def check_complete(file: Path, binary: bool) -> None:
    """Raises ``BadFile`` for a file that is missing or truncated, or a pickle that contains more than arrays.

    Only the size of a binary file is checked.
    """
    if kind := irregular(file):
        raise BadFile(kind)
    if not file.is_file():
        raise BadFile("no such file")
    if not (size := file.stat().st_size):
        raise BadFile("empty")
    if size > LONGEST:
        raise BadFile(f"{size} bytes; at most {LONGEST} are read")
    if binary and size % RECORD:
        raise BadFile(f"cut off: {size} bytes are not a whole number of records of {RECORD} bytes")
    if not binary and _last_byte(file) != pickle.STOP:
        raise BadFile(f"cut off after {size} bytes: the end mark of a pickle is missing")
    if not binary:
        _check_names(file)


def _check_names(file: Path) -> None:
    """Raises ``BadFile`` for a pickle that refers to anything but arrays. Constructs no object of it."""
    try:
        codes = pickletools.genops(read_bytes(file, LONGEST))
        named = [str(name) for code, name, _ in codes if code.name == "GLOBAL"]
    except (ValueError, IndexError, OverflowError) as error:
        raise BadFile(f"not a CIFAR-10 batch: not a pickle of plain data ({error})") from error
    wrong = next((name for name in named if name not in NAMES), None)
    if wrong is not None:
        raise BadFile(f"not a CIFAR-10 batch: {wrong.replace(' ', '.')} is not allowed")


def _last_byte(file: Path) -> bytes:
    with opened(file) as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read()


def check_cifar10(settings: Cifar10) -> Iterator[Problem]:
    mnist = "data.fallback=mnist5k trains on digits instead"
    if not Path(settings.root).is_dir():
        yield Problem("data.root", f"{settings.root}: there is no such folder; {mnist}")
        return

    batches = find(settings.root)
    if batches is None:
        text = "no data_batch_1 or data_batch_1.bin in this folder, or in the archive's folder in it"
        yield Problem("data.root", f"{settings.root}: {text}")
        return

    for file in (*batches.train, *batches.test):
        try:
            check_complete(file, batches.binary)
        except BadFile as error:
            yield Problem("data.root", f"{file}: {error}")
