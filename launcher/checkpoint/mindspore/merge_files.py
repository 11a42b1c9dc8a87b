"""Merges the strategy files of all pipeline stages into one, in our format or MindSpore's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.mindspore.formats import read_stages, write_strategy
from launcher.checkpoint.mindspore.strategy_input import is_ours
from launcher.checkpoint.tensorfile.durable import write_text

SUFFIX = {"protobuf": ".ckpt", "json": ".json"}
"""The suffixes by which MindSpore distinguishes its two formats."""


def merge_pipeline_strategies(
    src_strategy_dirs: str | os.PathLike[str], dst_strategy_file: str | os.PathLike[str]
) -> None:
    """Merges the strategy files in the folder ``src_strategy_dirs`` into one file of the same format.

    The format is recognized by content. Raises ``TypeError`` for an argument that is not a path,
    ``NotADirectoryError`` if the source is not a folder, ``ValueError`` if it has no strategy file, files of
    two formats, or files that do not belong together.
    """
    merging(src_strategy_dirs, dst_strategy_file)()


def merging(
    src_strategy_dirs: str | os.PathLike[str], dst_strategy_file: str | os.PathLike[str]
) -> Callable[[], None]:
    """Checks and merges the files; returns the function that writes the result.

    It raises as ``merge_pipeline_strategies`` does, before the returned function is called.
    """
    for key, value in (("src_strategy_dirs", src_strategy_dirs), ("dst_strategy_file", dst_strategy_file)):
        if not isinstance(value, str | os.PathLike):
            raise TypeError(f"{key}: expected a path, got {type(value).__name__}")
    folder = Path(src_strategy_dirs)
    path = Path(dst_strategy_file)
    if not folder.is_dir():
        raise NotADirectoryError(f"src_strategy_dirs: {folder} is not a folder")

    # all files must be ours, or all MindSpore's
    files = sorted(p for p in folder.iterdir() if p.suffix in SUFFIX.values() and p.is_file())
    if not files:
        raise ValueError(f"src_strategy_dirs: {folder} has no strategy files (.json or .ckpt)")
    ours = [file for file in files if is_ours(file)]
    if ours and len(ours) < len(files):
        other = next(file for file in files if file not in ours)
        raise ValueError(
            f"two forms in one merge: {ours[0]} is ours, {other} is MindSpore's; merge files of one form"
        )
    return _merging_ours(files, path) if ours else _merging_mindspores(files, path)


merge_pipeline_strategys = merge_pipeline_strategies  # MindSpore's spelling of the name


def _merging_ours(files: list[Path], path: Path) -> Callable[[], None]:
    strategy = strategy_file.merge([strategy_file.read(file) for file in files])
    text = strategy_file.text(strategy, tuple(range(strategy.stages)))

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)

    return write


def _merging_mindspores(files: list[Path], path: Path) -> Callable[[], None]:
    merged, form = read_stages(files)
    if path.suffix != SUFFIX[form]:
        raise ValueError(
            f"dst_strategy_file: {path}: the files are {form}; give a name that ends in {SUFFIX[form]}"
        )

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_strategy(path, merged, form)

    return write
