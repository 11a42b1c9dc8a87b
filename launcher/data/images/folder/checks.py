"""Checks a folder of images before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from launcher.data.files.bad_file import BadFile
from launcher.data.images.folder.listing import SUFFIXES, Listing, class_folders, listed
from launcher.data.images.folder.read import installed, side
from launcher.errors import Problem
from launcher.job.schema.components import ImageFolder
from launcher.optional_packages import install_command

HEADS = 10_000
"""The maximum number of files whose headers are read, evenly spread; that takes about a second."""
SHOWN = 5
HELD_OUT = ("val", "valid", "validation", "test")


def check_images(settings: ImageFolder) -> Iterator[Problem]:
    """Yields every problem with the folders and their files."""
    if not installed():
        text = f"images are read by Pillow, which is not installed: {install_command('images')}"
        yield Problem("data", text)
        return

    # check the folders
    wrong = [*_unfit("data.root", settings.root)]
    if settings.val is not None:
        wrong += _unfit("data.val", settings.val)
    if wrong:
        yield from wrong
        return

    # check their files
    train = listed(settings.root)
    yield from _files("data.root", settings.root, train, settings)
    if settings.val is not None:
        unknown = [n for n in class_folders(settings.val) if n not in train.classes]
        if unknown:
            yield Problem("data.val", f"{settings.val}: {_some(unknown)}: no class of data.root")
        yield from _files("data.val", settings.val, listed(settings.val, train.classes), settings)
    elif train.images and len(train.images) == round(len(train.images) * settings.val_fraction):
        text = f"{settings.val_fraction} leaves none of {len(train.images)} images to train on"
        yield Problem("data.val_fraction", text, "data.val_fraction=0.1")


def _unfit(key: str, root: str) -> Iterator[Problem]:
    """Reports why ``root`` is not a folder of class folders."""
    if not os.path.isdir(root):
        yield Problem(key, f"{root}: there is no such folder")
        return
    names = class_folders(root)
    held = next((n for n in HELD_OUT if n in names), None)
    if key == "data.root" and "train" in names and held:
        cure = f"data.root={os.path.join(root, 'train')} data.val={os.path.join(root, held)}"
        yield Problem(key, f"{root}: its folders are train and {held}, which are no classes", cure)
    elif not names:
        yield Problem(key, f"{root}: has no folders; the images of each class are in a folder of that name")


def _files(key: str, root: str, found: Listing, settings: ImageFolder) -> Iterator[Problem]:
    have = {n for _, n in found.images}
    empty = [name for n, name in enumerate(found.classes) if n not in have]
    if empty and key == "data.root":
        kinds = ", ".join(SUFFIXES)
        yield Problem(key, f"{root}: {_some(empty)}: no image ({kinds}); each folder is a class")
    elif not have:
        yield Problem(key, f"{root}: no image in it")
    if found.others:
        text = f"{_some(found.others)}: {'not an image' if len(found.others) == 1 else 'no images'} by name"
        yield Problem(key, f"{text} ({', '.join(SUFFIXES)} are read); move them out of {root}")
    yield from _heads(key, [path for path, _ in found.images], settings)


def _heads(key: str, paths: Sequence[str], settings: ImageFolder) -> Iterator[Problem]:
    """Reports files that their headers show to be broken, and sizes that do not fit."""
    looked = list(paths)
    if len(paths) > HEADS:
        looked = [paths[i] for i in np.linspace(0, len(paths) - 1, HEADS).astype(int)]
    sides: dict[str, tuple[int, int]] = {}
    broken = []
    for path in looked:
        try:
            sides[path] = side(path)
        except BadFile as error:
            broken.append(Problem(key, f"{path}: {error}"))

    yield from broken[:SHOWN]
    if len(broken) > SHOWN:
        yield Problem(key, f"and {len(broken) - SHOWN} more images cannot be read")
    yield from _sizes(sides, settings, crops=key == "data.root")


def _sizes(sides: Mapping[str, tuple[int, int]], settings: ImageFolder, crops: bool) -> Iterator[Problem]:
    """Reports images too small or of the wrong size. ``sides``: (width, height) by path."""
    size = settings.size
    others = [path for path, both in sides.items() if both != (size, size)]
    if settings.resize is None and others:
        text = f"null: {_pixels(others, sides)}, and data.size is {size}"
        how = "data.resize says how they get to have it"
        yield Problem("data.resize", f"{text}; {how}", "data.resize=bilinear")
    if settings.crop is None or not crops:
        return
    cut, padding = settings.cut, settings.crop.padding
    small = sorted((min(both), path) for path, both in sides.items() if min(both) + 2 * padding < cut)
    if small:
        most = small[0][0] + 2 * padding
        text = f"{_pixels([path for _, path in small], sides)}, too few with data.crop.padding={padding}"
        resize = " data.resize=bilinear" if settings.resize is None and most != size else ""
        yield Problem("data.crop.size", f"{cut}: {text}", f"data.crop.size={most}{resize}")


def _pixels(paths: Sequence[str], sides: Mapping[str, tuple[int, int]]) -> str:
    width, height = sides[paths[0]]
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]}{more}: {width} x {height} pixels"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
