"""The checks of image files that the core calls."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.extras.images import cifar_files, idx_files
from launcher.extras.images.cifar_files import check_cifar10
from launcher.extras.images.folder_files import check_images, class_folders, listed
from launcher.extras.images.idx_files import check_idx
from launcher.job.schema.data import Cifar10, Idx, ImageFolder

__all__ = ["check_cifar10", "check_idx", "check_images", "class_folders", "files"]


def files(settings: ImageFolder | Idx | Cifar10) -> list[tuple[str, Path]]:
    """Returns the files that samples are read from, in the order of samples.

    Each has its name in the data set.
    """
    match settings:
        case ImageFolder():
            train = listed(settings.root)
            named = [(os.path.relpath(path, settings.root), Path(path)) for path, _ in train.images]
            if settings.val is not None:
                held_out = listed(settings.val, train.classes).images
                named += [(f"val/{os.path.relpath(path, settings.val)}", Path(path)) for path, _ in held_out]
            return named
        case Idx():
            parts = [idx_files.find(settings.root, name) for name in (*idx_files.TRAIN, *idx_files.TEST)]
            return [(file.name, file) for file in parts if file is not None]
        case _:
            batches = cifar_files.find(settings.root)
            return [] if batches is None else [(file.name, file) for file in (*batches.train, *batches.test)]
