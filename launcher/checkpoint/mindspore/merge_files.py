"""The strategy files of all pipeline stages joined into one, ours or MindSpore's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.mindspore.formats import read_stages, write_strategy
from launcher.checkpoint.mindspore.strategy_input import is_ours
from launcher.checkpoint.tensorfile.durable import write_text

SUFFIX = {"protobuf": ".ckpt", "json": ".json"}
"""What MindSpore tells the two forms apart by."""


def merge_pipeline_strategies(
    src_strategy_dirs: str | os.PathLike[str], dst_strategy_file: str | os.PathLike[str]
) -> None:
    """Join the strategy files in the folder ``src_strategy_dirs``, told apart by content; the form stays.

    Raises ``NotADirectoryError`` unless it is a folder, ``ValueError`` when it holds no strategy file, two
    forms, or files that do not belong together.
    """
    merging(src_strategy_dirs, dst_strategy_file)()


def merging(
    src_strategy_dirs: str | os.PathLike[str], dst_strategy_file: str | os.PathLike[str]
) -> Callable[[], None]:
    """What writes the file; all that ``merge_pipeline_strategies`` raises for is found before that."""
    for key, value in (("src_strategy_dirs", src_strategy_dirs), ("dst_strategy_file", dst_strategy_file)):
        if not isinstance(value, str | os.PathLike):
            raise TypeError(f"{key}: expected a path, got {type(value).__name__}")
    folder = Path(src_strategy_dirs)
    path = Path(dst_strategy_file)
    if not folder.is_dir():
        raise NotADirectoryError(f"src_strategy_dirs: {folder} is not a folder")

    # the files, all of them ours or all MindSpore's
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


merge_pipeline_strategys = merge_pipeline_strategies  # the name as MindSpore spells it


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
