"""Checks of image files: IDX, CIFAR, and folders of images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.data.file_kinds import BadFile
from launcher.data.mnist5k import size_problems
from launcher.errors import Problem
from launcher.extras.images import cifar_files, idx_files
from launcher.extras.images.folder_files import check_images, class_folders
from launcher.job.schema.components import Cifar10, Idx
from launcher.untrusted.hub import download_hint

__all__ = ["check_cifar10", "check_idx", "check_images", "class_folders"]


def check_idx(settings: Idx) -> Iterator[Problem]:
    if not Path(settings.root).is_dir():
        text = f"{settings.root}: there is no such folder{download_hint(settings.root, 'dataset')}"
        yield Problem("data.root", text)
        return

    # check each pair of files; the size must hold the largest image of both
    side = 0
    for images, labels in (idx_files.TRAIN, idx_files.TEST):
        shapes = []
        for name, dims in ((images, 3), (labels, 1)):
            try:
                shapes.append(idx_files.complete_shape(settings.root, name, dims))
            except BadFile as error:
                yield Problem("data.root", f"{Path(settings.root, name)}: {error}")

        # the numbers of images and labels must agree
        if len(shapes) == 2 and shapes[0][0] != shapes[1][0]:
            have, labelled = shapes[0][0], shapes[1][0]
            text = f"{have} images, but {labels} has {labelled} labels"
            yield Problem("data.root", f"{Path(settings.root, images)}: {text}")

        side = max((side, *(n for shape in shapes for n in shape[1:])))
    yield from size_problems(side, settings.size)


def check_cifar10(settings: Cifar10) -> Iterator[Problem]:
    mnist = "data.fallback=mnist5k trains on digits instead"
    if not Path(settings.root).is_dir():
        yield Problem("data.root", f"{settings.root}: there is no such folder; {mnist}")
        return

    batches = cifar_files.find(settings.root)
    if batches is None:
        text = "has no data_batch_1 or data_batch_1.bin, nor has the archive's folder in it"
        yield Problem("data.root", f"{settings.root}: {text}")
        return

    for file in (*batches.train, *batches.test):
        try:
            cifar_files.check_complete(file, batches.binary)
        except BadFile as error:
            yield Problem("data.root", f"{file}: {error}")
