"""The images below a folder and their classes, without opening one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

SUFFIXES = (".png", ".jpg", ".jpeg")


@dataclass
class Listing:
    """``classes`` by name, in order; ``images`` by path, each with the number of its class.

    ``others`` are files in class folders that are no images by their name; hidden files are left out.
    """

    classes: list[str]
    images: list[tuple[str, int]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def class_folders(root: str) -> list[str]:
    """Names of the folders in ``root``, in order; none where there is no such folder."""
    try:
        with os.scandir(root) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError:
        return []


def listed(root: str, classes: list[str] | None = None) -> Listing:
    """Everything below ``root``, folder by folder in order of names, whatever the file system.

    ``classes`` numbers them where it is given; a folder that is none of these is left out.
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
