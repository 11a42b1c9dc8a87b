"""Lists the images below a folder and their classes, without opening one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

SUFFIXES = (".png", ".jpg", ".jpeg")


@dataclass
class Listing:
    """The ``classes`` in order of their names, and the path of each of the ``images`` with its class number.

    ``others``: files in class folders whose names are not those of images. Hidden files are left out.
    """

    classes: list[str]
    images: list[tuple[str, int]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def class_folders(root: str) -> list[str]:
    """The names of the folders in ``root``, sorted; empty if it does not exist."""
    try:
        with os.scandir(root) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError:
        return []


def listed(root: str, classes: list[str] | None = None) -> Listing:
    """Lists everything below ``root`` in order of names, whatever the file system's order.

    ``classes`` numbers the classes if given; a folder not among them is skipped.
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
