"""Writes a folder atomically: it appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.checkpoint.manifest import NAME
from launcher.checkpoint.store import partial
from launcher.checkpoint.tensorfile.durable import publish


@contextmanager
def fresh(final: Path) -> Iterator[Path]:
    """Yields an empty folder beside ``final``, which replaces ``final`` when the block ends.

    If the block raises, the new folder is deleted. If ``final`` is a link, the folder that it leads to is
    replaced.
    """
    final = Path(os.path.realpath(final))
    new = partial(final)
    if new.exists():
        shutil.rmtree(new)
    new.mkdir(parents=True)
    try:
        yield new
        publish(new, final)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def check_destination(dst: Path, overwrite: bool, own: Callable[[Path], bool], what: str) -> None:
    """Raises ``FileExistsError`` unless ``dst`` is empty or absent, or may be overwritten.

    With ``overwrite`` a folder is accepted only if ``own`` recognizes it; ``what`` names its kind in errors.
    """
    if not overwrite or not dst.is_dir():
        check_empty(dst, "; give another, or overwrite: true")
        return
    check_outside(dst)
    if any(dst.iterdir()) and not own(dst):
        raise FileExistsError(
            f"{dst}: the destination is not empty and no {what}, so it is not overwritten either"
        )


def check_empty(dst: Path, cure: str = "; give another") -> None:
    """Raises ``FileExistsError`` unless ``dst`` is absent or an empty folder."""
    check_outside(dst)
    if dst.exists() and not dst.is_dir():
        raise FileExistsError(f"{dst}: the destination is a file, not a folder")
    if dst.is_dir() and any(dst.iterdir()):
        raise FileExistsError(f"{dst}: the destination is not empty{cure}")


def check_outside(dst: Path) -> None:
    """Raises ``ValueError`` if ``dst`` is inside a checkpoint, which a foreign file would damage."""
    for folder in Path(os.path.realpath(dst)).parents:
        if (folder / NAME).is_file():
            raise ValueError(f"{dst}: the destination is in the checkpoint {folder}; give one outside of it")


def check_apart(src: Path, dst: Path) -> None:
    """Raises ``ValueError`` if ``src`` and ``dst`` are the same folder, or one is inside the other."""
    here, there = Path(os.path.realpath(src)), Path(os.path.realpath(dst))
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(
            f"{dst}: the destination and the source {src} are the same folder, or one is in the other"
        )
