"""Finds the newest file in each rank's folder."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.checkpoint.mindspore.rank_source import SUFFIXES

_RANK = re.compile(r"rank_(0|[1-9]\d*)")
_STEP = re.compile(r"(?:(\d+)_)?(\d+)$")


def rank_paths(folder: Path) -> dict[int, Path]:
    """Returns the file of each ``rank_<k>`` below ``folder``, by rank; of several, that of the highest step.

    All must be safetensors files, or all ``.ckpt`` files. Raises ``NotADirectoryError``, and ``ValueError``
    if there are two formats, no ranks, or a rank without a file or with files that cannot be ordered.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: not a folder")
    matches = ((_RANK.fullmatch(path.name), path) for path in folder.iterdir())
    homes = {int(match[1]): path for match, path in matches if match is not None and path.is_dir()}
    if not homes:
        raise ValueError(f"{folder}: no rank_<k> folders in it")

    # one file per rank, all of one format
    found = {rank: newest(homes[rank]) for rank in sorted(homes)}
    first = next(iter(found.values()))
    other = [path for path in found.values() if path.suffix != first.suffix]
    if other:
        raise ValueError(f"{first} and {other[0]}: two formats in one source; give files of one")
    return found


def newest(home: Path) -> Path:
    """Returns the newest file of a rank's folder: ``net-10_5`` is newer than ``net-9_7``.

    A file name ends in the numbers of epoch and step, or in that of the step alone. Raises ``ValueError``.
    """
    # regular files only: opening a pipe would block
    files = sorted(path for path in home.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise ValueError(f"{home}: no .safetensors or .ckpt file in it")
    other = [path for path in files if path.suffix != files[0].suffix]
    if other:
        raise ValueError(f"{files[0]} and {other[0].name}: two formats in one folder; leave files of one")
    if len(files) == 1:
        return files[0]

    # the highest step, if all names have the same form
    steps = {path: _step(path) for path in files}
    best = max(steps.values(), default=())
    found = [path for path, step in steps.items() if step == best]
    if len({*map(len, steps.values())}) > 1 or not best or len(found) > 1:
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{home}: which file counts? {names} do not end in different steps; leave one")
    return found[0]


def _step(path: Path) -> tuple[int, ...]:
    match = _STEP.search(path.stem)
    return () if match is None else tuple(int(n) for n in match.groups() if n is not None)
