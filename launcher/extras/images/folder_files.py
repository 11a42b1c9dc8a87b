"""Lists, reads and checks folders of images, one folder per class."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from launcher.data.file_kinds import BadFile
from launcher.errors import Problem, error_text
from launcher.job.schema.data import ImageFolder
from launcher.optional import install_command
from launcher.untrusted.files import opened, read_bytes
from launcher.untrusted.hub_name_hint import download_hint

if TYPE_CHECKING:
    from PIL.Image import Image


SUFFIXES = (".png", ".jpg", ".jpeg")


@dataclass
class Listing:
    """The ``classes`` in order of their names, and the path of each of the ``images`` with its class number.

    ``others``: files in class folders that do not end in one of ``SUFFIXES``. Hidden files are left out.
    """

    classes: list[str]
    images: list[tuple[str, int]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def class_folders(root: str) -> list[str]:
    """Returns the names of the folders in ``root``, sorted; empty if it does not exist."""
    try:
        with os.scandir(root) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError:
        return []


def listed(root: str, classes: list[str] | None = None) -> Listing:
    """Lists everything below ``root`` in order of names, whatever the file system's order.

    ``classes``, if given, are the classes in the order of their numbers; other folders are skipped.
    """
    names = class_folders(root)
    out = Listing(names if classes is None else classes)
    numbers = {name: n for n, name in enumerate(out.classes)}
    for name in names:
        if name in numbers:
            _walk(os.path.join(root, name), numbers[name], out)
    return out


def _walk(folder: str, number: int, out: Listing) -> None:
    for at, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(at, name)
            if name.lower().endswith(SUFFIXES):
                out.images.append((path, number))
            elif not name.startswith("."):
                out.others.append(path)


LARGEST_FILE = 256 << 20
"""The maximum size of a file, in bytes."""
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")
"""Pillow's names of the modes with at most eight bits per channel."""


def installed() -> bool:
    return find_spec("PIL") is not None


def side(path: str) -> tuple[int, int]:
    """Returns the width and height in the file's header. Raises ``BadFile``."""
    with _errors(), opened(path, LARGEST_FILE) as file:
        size: tuple[int, int] = _head(file).size
    return size


def decoded(path: str, channels: int) -> Image:
    """Decodes the image, as greyscale if ``channels`` is 1 and otherwise as RGB. Raises ``BadFile``."""
    with _errors():
        return _head(io.BytesIO(read_bytes(path, LARGEST_FILE))).convert("L" if channels == 1 else "RGB")


def _head(file: BinaryIO) -> Image:
    from PIL import Image

    image = Image.open(file, formats=("PNG", "JPEG"))
    if image.mode not in MODES:
        raise BadFile(f"pixel mode {image.mode} is not supported; use eight bits per channel")
    return image


@contextmanager
def _errors() -> Iterator[None]:
    """Turns errors of Pillow and of the system into ``BadFile``."""
    from PIL import UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow warns of images too large for memory, and of broken ones
            yield
    except BadFile:
        raise
    except UnidentifiedImageError:
        raise BadFile("is neither PNG nor JPEG") from None
    except OSError as error:
        raise BadFile(error.strerror or f"broken: {error}") from error
    except Exception as error:  # a broken file can raise anything
        raise BadFile(f"broken: {error_text(error)}") from error


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
            yield Problem("data.val", f"{settings.val}: {_some(unknown)}: not a class of data.root")
        yield from _files("data.val", settings.val, listed(settings.val, train.classes), settings)
    elif train.images and len(train.images) == round(len(train.images) * settings.val_fraction):
        text = f"{settings.val_fraction} leaves none of {len(train.images)} images to train on"
        yield Problem("data.val_fraction", text, "data.val_fraction=0.1")


def _unfit(key: str, root: str) -> Iterator[Problem]:
    """Reports why ``root`` is not a folder of class folders."""
    if not os.path.isdir(root):
        yield Problem(key, f"{root}: there is no such folder{download_hint(root, 'dataset')}")
        return
    names = class_folders(root)
    held_out = next((n for n in HELD_OUT if n in names), None)
    if key == "data.root" and "train" in names and held_out:
        cure = f"data.root={os.path.join(root, 'train')} data.val={os.path.join(root, held_out)}"
        yield Problem(key, f"{root}: its folders are train and {held_out}, which are not classes", cure)
    elif not names:
        yield Problem(
            key, f"{root}: no folders in it; put the images of each class into a folder named after the class"
        )


def _files(key: str, root: str, listing: Listing, settings: ImageFolder) -> Iterator[Problem]:
    have = {n for _, n in listing.images}
    empty = [name for n, name in enumerate(listing.classes) if n not in have]
    if empty and key == "data.root":
        kinds = ", ".join(SUFFIXES)
        yield Problem(key, f"{root}: {_some(empty)}: no image ({kinds}) in it; each folder is a class")
    elif not have:
        yield Problem(key, f"{root}: no image in it")
    if listing.others:
        text = f"{_some(listing.others)}: only {', '.join(SUFFIXES)} files are read as images"
        yield Problem(key, f"{text}; move others out of {root}")
    yield from _heads(key, [path for path, _ in listing.images], settings)


def _heads(key: str, paths: Sequence[str], settings: ImageFolder) -> Iterator[Problem]:
    """Reports files with broken headers, and images whose sizes do not fit the settings."""
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
        yield Problem("data.resize", f"{text}; choose how to resize images", "data.resize=bilinear")
    if settings.crop is None or not crops:
        return
    cut, padding = settings.cut, settings.crop.padding
    small = sorted((min(both), path) for path, both in sides.items() if min(both) + 2 * padding < cut)
    if small:
        most = small[0][0] + 2 * padding
        text = f"{_pixels([path for _, path in small], sides)}, too small with data.crop.padding={padding}"
        resize = " data.resize=bilinear" if settings.resize is None and most != size else ""
        yield Problem("data.crop.size", f"{cut}: {text}", f"data.crop.size={most}{resize}")


def _pixels(paths: Sequence[str], sides: Mapping[str, tuple[int, int]]) -> str:
    """Describes the first of the images that do not fit, and counts them."""
    width, height = sides[paths[0]]
    more = f" (one of {len(paths)} images that do not fit)" if len(paths) > 1 else ""
    return f"{paths[0]} has {width} x {height} pixels{more}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
