"""Reads the headers of IDX files, and checks the files against their headers and each other."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO

from launcher.data.file_kinds import BadFile
from launcher.data.mnist5k import size_problems
from launcher.errors import Problem
from launcher.job.schema.data import Idx
from launcher.untrusted.files import RefusedFile, opened, stands
from launcher.untrusted.hub_name_hint import download_hint

TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
BYTES = 0x08
INFLATED = 1 << 30
"""The most bytes that a gzipped file may unpack to in memory; the largest file of EMNIST has half as many."""


def find(root: str, name: str) -> Path | None:
    """Finds the file; the plain one takes precedence over the gzipped one."""
    return next((f for f in (Path(root, name), Path(root, f"{name}.gz")) if stands(f)), None)


def offset(shape: tuple[int, ...]) -> int:
    """Returns the number of bytes before the first element."""
    return 4 + 4 * len(shape)


def inflated(stream: BinaryIO) -> gzip.GzipFile:
    """Returns the content of a gzip file as a stream.

    Limit what you read: a few bytes can expand to any number.
    """
    return gzip.GzipFile(fileobj=stream)


def header(file: Path) -> tuple[int, ...]:
    """Reads the shape. Raises ``BadFile``."""
    try:
        with opened(file) as plain, inflated(plain) if file.suffix == ".gz" else plain as stream:
            start = stream.read(4)
            dims = start[3] if len(start) == 4 else 0
            if start[:3] != bytes((0, 0, BYTES)) or not dims:
                begins = f"it begins with 0x{start.hex()}" if start else "it is empty"
                raise BadFile(f"not an idx file of unsigned bytes: {begins}")
            words = stream.read(4 * dims)
    except RefusedFile as error:
        raise BadFile(error.strerror) from error
    except (OSError, EOFError, zlib.error) as error:
        raise BadFile(f"cannot be read: {error}") from error

    # one length per dim
    if len(words) < 4 * dims:
        raise BadFile("cut off inside its header")
    return tuple(int.from_bytes(words[i : i + 4]) for i in range(0, 4 * dims, 4))


def complete_shape(root: str, name: str, dims: int) -> tuple[int, ...]:
    """Returns the shape of a complete array of ``dims`` dims. Raises ``BadFile`` if the file has none."""
    file = find(root, name)
    if file is None:
        raise BadFile("no such file, plain or with .gz")
    shape = header(file)
    if len(shape) != dims:
        raise BadFile(f"an array of {len(shape)} dims, not {dims}")

    # the file must have the size that the shape requires; a gzip file stores its own modulo 4 GB
    need = offset(shape) + prod(shape)
    packed = file.suffix == ".gz"
    if packed and need > INFLATED:
        text = f"at most {INFLATED} are unpacked in memory: gunzip it"
        raise BadFile(f"its header promises {need} bytes; {text}")
    have = _size(file)
    expected = need % 2**32 if packed else need
    if have != expected:
        size = " x ".join(map(str, shape))
        reason = "its end is missing" if packed else f"the file has {have}"
        wrong = "too long" if have > expected and not packed else "cut off"
        raise BadFile(f"{wrong}: its header promises {size} bytes, {need} with the header; {reason}")
    return shape


def _size(file: Path) -> int:
    """Returns the uncompressed size in bytes.

    A gzip file stores it in its last four bytes, modulo 4 GB; a truncated one ends differently.
    """
    if file.suffix != ".gz":
        return file.stat().st_size
    with opened(file) as stream:
        stream.seek(-4, os.SEEK_END)
        return int.from_bytes(stream.read(), "little")


def check_idx(settings: Idx) -> Iterator[Problem]:
    if not Path(settings.root).is_dir():
        text = f"{settings.root}: there is no such folder{download_hint(settings.root, 'dataset')}"
        yield Problem("data.root", text)
        return

    # check each pair of files; data.size must not be less than the largest image of both
    side = 0
    for images, labels in (TRAIN, TEST):
        shapes = []
        for name, dims in ((images, 3), (labels, 1)):
            try:
                shapes.append(complete_shape(settings.root, name, dims))
            except BadFile as error:
                yield Problem("data.root", f"{Path(settings.root, name)}: {error}")

        # the numbers of images and labels must agree
        if len(shapes) == 2 and shapes[0][0] != shapes[1][0]:
            have, labeled = shapes[0][0], shapes[1][0]
            text = f"{have} images, but {labels} has {labeled} labels"
            yield Problem("data.root", f"{Path(settings.root, images)}: {text}")

        side = max((side, *(n for shape in shapes for n in shape[1:])))
    yield from size_problems(side, settings.size)
