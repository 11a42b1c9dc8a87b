"""Functions with the names and arguments of MindSpore's, for files with one strategy and one folder a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from launcher.checkpoint import strategy_file
from launcher.checkpoint.choose import takes
from launcher.checkpoint.durable import sync
from launcher.checkpoint.fresh import check_apart, check_empty, fresh
from launcher.checkpoint.rank_files import RankFiles, held_boxes, whole_strategy, write_held
from launcher.checkpoint.rank_folders import rank_paths
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.strategy import Strategy, match, single
from launcher.checkpoint.transform import is_checkpoint

Given = str | os.PathLike[str] | None


def rank_list_for_transform(
    rank_id: int, src_strategy_file: Given = None, dst_strategy_file: Given = None
) -> list[int]:
    """The source ranks whose files ``rank_id`` of the destination is made from, descending; only those needed.

    A strategy of ``None`` is one full checkpoint, on rank 0. Raises ``TypeError`` for arguments of other types,
    ``ValueError`` for a strategy that cannot be read, a rank outside the destination, or strategies that do not fit.
    """
    _check_type("rank_id", rank_id, int)
    src, dst = _strategy("src_strategy_file", src_strategy_file), _strategy("dst_strategy_file", dst_strategy_file)
    _check_rank(rank_id, dst)
    if src is None:
        return [0]
    after = single(src) if dst is None else dst
    return sorted({take.rank for take in takes(src, after, match(src, after), rank_id)}, reverse=True)


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, Any],
    save_checkpoint_file_name: str,
    src_strategy_file: Given = None,
    dst_strategy_file: Given = None,
) -> None:
    """Write the file of ``rank_id`` of the destination, from source files by rank: at least those of the rank list.

    Raises as ``rank_list_for_transform``; ``ValueError`` also for a source file that is missing or does not fit.
    """
    _check_type("rank_id", rank_id, int)
    if not isinstance(checkpoint_files_map, dict):
        raise TypeError(f"checkpoint_files_map: expected a dict, got {type(checkpoint_files_map).__name__}")
    paths = {rank: _source(rank, path) for rank, path in sorted(checkpoint_files_map.items())}
    _check_type("save_checkpoint_file_name", save_checkpoint_file_name, str)
    path = Path(save_checkpoint_file_name)
    _check_suffix("save_checkpoint_file_name", path)
    src, dst = _strategy("src_strategy_file", src_strategy_file), _strategy("dst_strategy_file", dst_strategy_file)
    _check_rank(rank_id, dst)
    files, after, names = _sides(paths, src, dst, complete=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.partial")
    try:
        files.write(after, names, rank_id, new)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def transform_checkpoints(
    src_checkpoints_dir: Given,
    dst_checkpoints_dir: Given,
    ckpt_prefix: str,
    src_strategy_file: Given = None,
    dst_strategy_file: Given = None,
    process_num: int = 1,
    output_format: str = "safetensors",
) -> None:
    """Write ``rank_<k>/<ckpt_prefix><k>.safetensors`` for every rank of the destination, which appears when complete.

    The source has ``rank_<k>`` folders; of several files in one, that of the highest step counts. It may be a
    checkpoint of ours, which brings its strategy along. ``process_num`` ranks are written at a time. Everything is
    checked first. Raises ``TypeError`` and ``ValueError`` as the functions above, ``NotADirectoryError`` for a source
    or destination that is no folder, ``FileExistsError`` for one not empty.
    """
    source, target = (
        _folder("src_checkpoints_dir", src_checkpoints_dir),
        _folder("dst_checkpoints_dir", dst_checkpoints_dir),
    )
    _check_type("ckpt_prefix", ckpt_prefix, str)
    if Path(f"{ckpt_prefix}0").name != f"{ckpt_prefix}0" or "\0" in ckpt_prefix:
        raise ValueError(f"ckpt_prefix: {ckpt_prefix!r} leaves the rank's folder; give the start of a file name")
    _check_type("process_num", process_num, int)
    if process_num < 1:
        raise ValueError(f"process_num: {process_num} is not at least 1")
    _check_format(output_format)
    src, dst = _strategy("src_strategy_file", src_strategy_file), _strategy("dst_strategy_file", dst_strategy_file)
    if is_checkpoint(source):
        after, write = _from_checkpoint(source, src, dst)
    else:
        files, after, names = _sides(rank_paths(source), src, dst, complete=True)
        write = partial(files.write, after, names)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"dst_checkpoints_dir: {target} is not a folder")
    check_apart(source, target)
    check_empty(target)
    with fresh(target) as new, ThreadPoolExecutor(process_num) as pool:
        ranks = range(after.grid.size)
        homes = [new / f"rank_{rank}" for rank in ranks]
        for home in homes:
            home.mkdir()
        list(pool.map(write, ranks, [home / f"{ckpt_prefix}{rank}.safetensors" for rank, home in enumerate(homes)]))
        for folder in (*homes, new):
            sync(folder)


def _from_checkpoint(
    folder: Path, src: Strategy | None, dst: Strategy | None
) -> tuple[Strategy, Callable[[int, Path], None]]:
    """The destination's strategy, and what writes the file of a rank."""
    checkpoint = open_checkpoint(folder)
    if src is not None and src.digest != checkpoint.strategy.digest:
        raise ValueError(
            f"src_strategy_file: not the strategy that {folder} was saved with; give None to take that one"
        )
    after = single(checkpoint.strategy) if dst is None else dst
    names = match(checkpoint.strategy, after)
    Reader(checkpoint).check_headers()

    def write(rank: int, path: Path) -> None:
        reader, boxes = Reader(checkpoint), held_boxes(after, rank)
        write_held(path, after, rank, {}, lambda name: reader.chunks(names[name], boxes[name]))

    return after, write


def _sides(
    paths: Mapping[int, Path], src: Strategy | None, dst: Strategy | None, *, complete: bool
) -> tuple[RankFiles, Strategy, dict[str, str]]:
    """The source, the destination's strategy, and the names that match them."""
    if src is None and dst is None:
        raise ValueError("src_strategy_file and dst_strategy_file are both None: there is no other layout to write")
    listed = set() if dst is None else {*dst.named}
    own = src is not None
    if src is None:
        if [*paths] != [0]:
            raise ValueError(f"src_strategy_file is None: a full checkpoint is on rank 0 alone, not on {_told(paths)}")
        src = whole_strategy(paths[0], listed)
    world = src.grid.size
    if strange := [rank for rank in paths if not 0 <= rank < world]:
        raise ValueError(f"{paths[strange[0]]}: rank {strange[0]} is not in the source strategy's world of {world}")
    if complete and (lost := [rank for rank in range(world) if rank not in paths]):
        raise ValueError(f"the source strategy has {world} ranks; no folder for {_told(lost)}")
    after = single(src) if dst is None else dst
    names = match(src, after)
    return RankFiles(paths, src, listed, own=own), after, names


def _strategy(key: str, value: Given) -> Strategy | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{key}: expected a path or None, got {type(value).__name__}")
    path = Path(value)
    if path.suffix == ".ckpt":
        raise ValueError(f"{key}: {path} is a protobuf strategy file: not available yet; give a .json file")
    if not path.exists():
        raise ValueError(f"{key}: {path}: no such file")
    return strategy_file.load(path)


def _source(rank: Any, value: Any) -> Path:
    _check_type("checkpoint_files_map: a rank", rank, int)
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"checkpoint_files_map: rank {rank}: expected a path, got {type(value).__name__}")
    path = Path(value)
    _check_suffix(f"checkpoint_files_map: rank {rank}", path)
    if not path.is_file():
        raise ValueError(f"checkpoint_files_map: rank {rank}: {path}: no such file")
    return path


def _folder(key: str, value: Given) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{key}: expected a path, got {type(value).__name__}")
    path = Path(value)
    if key.startswith("src") and not path.is_dir():
        raise NotADirectoryError(f"{key}: {path} is not a folder")
    return path


def _check_type(key: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{key}: expected {kind.__name__}, got {type(value).__name__}")


def _check_rank(rank: int, dst: Strategy | None) -> None:
    world = 1 if dst is None else dst.grid.size
    if not 0 <= rank < world:
        raise ValueError(f"rank_id: {rank} is not in the destination's world of {world}")


def _check_suffix(key: str, path: Path) -> None:
    if path.suffix == ".ckpt":
        raise ValueError(f"{key}: {path}: .ckpt files are not available yet; give a .safetensors file")
    if path.suffix != ".safetensors":
        raise ValueError(f"{key}: {path} does not end in .safetensors")


def _check_format(name: str) -> None:
    if name == "ckpt":
        raise ValueError("output_format: ckpt is not available yet; give safetensors")
    if name != "safetensors":
        raise ValueError(f"output_format: {name!r} is not known; give safetensors")


def _told(ranks: Mapping[int, Any] | list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
