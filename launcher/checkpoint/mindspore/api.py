"""Functions with MindSpore's names and arguments that transform checkpoints of one folder per rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.checkpoint.atomic_folder import check_apart, check_empty
from launcher.checkpoint.layout.strategy import match
from launcher.checkpoint.mindspore.rank_conversion import (
    check_rank,
    file_transform,
    of_checkpoint,
    of_rank_folders,
    sides,
    write_ranks,
)
from launcher.checkpoint.mindspore.rank_source import SUFFIXES
from launcher.checkpoint.mindspore.source_ranks import takes
from launcher.checkpoint.mindspore.strategy_input import on_paper, open_strategy
from launcher.checkpoint.tensorfile.durable import sync
from launcher.checkpoint.transform import is_checkpoint
from launcher.plan.values.layout import Layout

PathLike = str | os.PathLike[str] | None


def build_searched_strategy(strategy_filename: str) -> dict[str, Layout]:
    """Returns the layout of each parameter in a strategy file: ours, or MindSpore's in either format.

    MindSpore's protobuf format has no shapes; each shape is then the smallest that the layout can cut. Raises
    ``TypeError`` if the argument is not a path, ``ValueError`` if it is not a strategy file.
    """
    found = open_strategy("strategy_filename", strategy_filename)
    if found is None:
        raise TypeError("strategy_filename: expected a path, got NoneType")
    strategy, _ = on_paper(found, None)
    return {name: entry.layout for name, entry in strategy.entries.items()}


def rank_list_for_transform(
    rank_id: int, src_strategy_file: PathLike = None, dst_strategy_file: PathLike = None
) -> list[int]:
    """Returns the source ranks whose files ``rank_id`` of the destination needs, in descending order.

    A strategy of ``None`` means a full checkpoint: rank 0 has it, and other ranks have copies. Raises
    ``TypeError`` for an argument of the wrong type, ``ValueError`` for a strategy that cannot be read, a rank
    outside the destination, or strategies that do not fit together.
    """
    _check_type("rank_id", rank_id, int)
    before = open_strategy("src_strategy_file", src_strategy_file)
    after = open_strategy("dst_strategy_file", dst_strategy_file)

    # one full checkpoint is one file
    if before is None:
        dst = None if after is None else on_paper(after, None)[0]
        check_rank(rank_id, dst)
        return [0]

    src, target = sides(before, after)
    check_rank(rank_id, target)
    found = takes(src, target, match(src, target), rank_id)
    return sorted({take.rank for take in found}, reverse=True)


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, Any],
    save_checkpoint_file_name: str,
    src_strategy_file: PathLike = None,
    dst_strategy_file: PathLike = None,
) -> None:
    """Writes the file of ``rank_id`` of the destination.

    ``checkpoint_files_map`` has the source's files by rank. It must have those of the ranks that
    ``rank_list_for_transform`` returns, and may have more. Raises as that function does, and ``ValueError``
    if a source file is missing or does not fit.
    """
    # check the arguments in MindSpore's order
    _check_type("rank_id", rank_id, int)
    if not isinstance(checkpoint_files_map, dict):
        raise TypeError(f"checkpoint_files_map: expected a dict, got {type(checkpoint_files_map).__name__}")
    paths = {rank: _source(rank, path) for rank, path in sorted(checkpoint_files_map.items())}
    _check_type("save_checkpoint_file_name", save_checkpoint_file_name, str)
    path = Path(save_checkpoint_file_name)
    _check_suffix("save_checkpoint_file_name", path)
    src = open_strategy("src_strategy_file", src_strategy_file)
    dst = open_strategy("dst_strategy_file", dst_strategy_file)

    # write the file; it gets its final name once it is complete
    transform = file_transform(paths, src, dst, rank_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        transform.write(rank_id, new)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def transform_checkpoints(
    src_checkpoints_dir: PathLike,
    dst_checkpoints_dir: PathLike,
    ckpt_prefix: str,
    src_strategy_file: PathLike = None,
    dst_strategy_file: PathLike = None,
    process_num: int = 1,
    output_format: str = "ckpt",
) -> None:
    """Writes ``rank_<k>/<ckpt_prefix><k>.<output_format>`` for every rank of the destination.

    Everything is checked before anything is written, and the destination appears when it is complete. A
    strategy of trainable parameters does not list other tensors, such as the statistics of BatchNorm. These
    are copied: all ranks that have one must have the same values.

    Args:
        src_checkpoints_dir: A folder of ``rank_<k>`` folders, or a checkpoint of ours, which contains its
            strategy. If a rank's folder has several files, the one of the highest step is read.
        dst_checkpoints_dir: The folder to write; absent or empty.
        ckpt_prefix: The start of the names of the files to write.
        src_strategy_file: The source's strategy; ``None``: every rank has the same full checkpoint.
        dst_strategy_file: The destination's strategy; ``None``: one full checkpoint.
        process_num: How many ranks are written at a time, by threads; one more thread syncs their files.
        output_format: ``ckpt`` or ``safetensors``, whatever the format of the source.

    Raises:
        TypeError, ValueError: As the functions above.
        NotADirectoryError: The source or the destination is not a folder.
        FileExistsError: The destination is not empty.
    """
    # check the arguments in MindSpore's order
    source = _folder("src_checkpoints_dir", src_checkpoints_dir)
    target = _folder("dst_checkpoints_dir", dst_checkpoints_dir)
    _check_prefix(ckpt_prefix)
    _check_count("process_num", process_num)
    _check_format(output_format)
    src = open_strategy("src_strategy_file", src_strategy_file)
    dst = open_strategy("dst_strategy_file", dst_strategy_file)

    # check the source, then the destination
    read = of_checkpoint if is_checkpoint(source) else of_rank_folders
    made = read(source, src, dst)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"dst_checkpoints_dir: {target} is not a folder")
    check_apart(source, target)
    check_empty(target)
    write_ranks(made, target, ckpt_prefix, f".{output_format}", workers=process_num)


def _source(rank: Any, value: Any) -> Path:
    _check_type("checkpoint_files_map: a rank", rank, int)
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"checkpoint_files_map: rank {rank}: expected a path, got {type(value).__name__}")
    path = Path(value)
    _check_suffix(f"checkpoint_files_map: rank {rank}", path)
    if not path.is_file():
        raise ValueError(f"checkpoint_files_map: rank {rank}: {path}: no such file")
    return path


def _folder(key: str, value: PathLike) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{key}: expected a path, got {type(value).__name__}")
    path = Path(value)
    if key.startswith("src") and not path.is_dir():
        raise NotADirectoryError(f"{key}: {path} is not a folder")
    return path


def _check_type(key: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{key}: expected {kind.__name__}, got {type(value).__name__}")


def _check_prefix(prefix: Any) -> None:
    _check_type("ckpt_prefix", prefix, str)
    if Path(f"{prefix}0").name != f"{prefix}0" or "\0" in prefix:
        raise ValueError(f"ckpt_prefix: {prefix!r} leaves the rank's folder; give the start of a file name")


def _check_count(key: str, value: Any) -> None:
    _check_type(key, value, int)
    if value < 1:
        raise ValueError(f"{key}: {value} is not at least 1")


def _check_suffix(key: str, path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{key}: {path} does not end in {' or '.join(SUFFIXES)}")


def _check_format(name: str) -> None:
    if f".{name}" not in SUFFIXES:
        raise ValueError(f"output_format: {name!r} is not known; give safetensors or ckpt")
