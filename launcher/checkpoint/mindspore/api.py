"""Functions with the names and arguments of MindSpore's, for files with one strategy and one folder a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher.checkpoint.atomic_folder import check_apart, check_empty, fresh
from launcher.checkpoint.layout.strategy import Strategy, match, single
from launcher.checkpoint.mindspore.formats import StrategyFile
from launcher.checkpoint.mindspore.rank_files import HeldTensors, RankFiles, held_boxes, whole_strategy, write_held
from launcher.checkpoint.mindspore.rank_folders import rank_paths
from launcher.checkpoint.mindspore.rank_source import SUFFIXES, RankSource, open_source
from launcher.checkpoint.mindspore.source_ranks import takes
from launcher.checkpoint.mindspore.strategy_input import (
    StrategyInput,
    by_stage,
    listed,
    of_slices,
    of_whole,
    on_paper,
    only_names,
    open_strategy,
    whole_specs,
)
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.tensorfile.durable import sync, write_text
from launcher.checkpoint.tensorfile.write_behind import WriteBehind
from launcher.checkpoint.transform import is_checkpoint
from launcher.plan.settings.saving import ANYONE, Trust
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.layout import Layout

PathLike = str | os.PathLike[str] | None
Layouts = Callable[[Strategy], Strategy]
"""A layout that is worked out from that of the source."""


@dataclass(frozen=True)
class RankFileTransform:
    """What becomes of the source's files: the layout ``after``, with the source's ``names`` by the destination's.

    ``stage`` is the pipeline stage that the source is of, where it is one of several.
    """

    files: RankFiles
    after: Strategy
    names: Mapping[str, str]
    stage: int | None

    def tensors(self, rank: int) -> HeldTensors:
        """What ``rank`` of the destination holds, for one thread."""
        return self.files.held(self.after, self.names, rank)

    def write(self, rank: int, path: Path, behind: WriteBehind | None = None) -> None:
        """The file of ``rank``."""
        self.files.write(self.after, self.names, rank, path, behind)


@dataclass(frozen=True)
class RankConversion:
    """``write(rank, path, behind=...)`` makes the file of a rank of ``after``.

    ``suffix`` is the source's; ``stage`` the one that the source is of, where it is one of several.
    """

    after: Strategy
    write: Callable[..., None]
    suffix: str
    stage: int | None = None


def build_searched_strategy(strategy_filename: str) -> dict[str, Layout]:
    """The layout of each parameter in a strategy file, ours or MindSpore's of either form.

    MindSpore's protobuf form leaves shapes out: theirs are then the smallest that can be cut so. Raises ``TypeError``
    for something that is no path, ``ValueError`` for what is no strategy file.
    """
    found = open_strategy("strategy_filename", strategy_filename)
    if found is None:
        raise TypeError("strategy_filename: expected a path, got NoneType")
    strategy, _ = on_paper(found, None)
    return {name: entry.layout for name, entry in strategy.entries.items()}


def rank_list_for_transform(
    rank_id: int, src_strategy_file: PathLike = None, dst_strategy_file: PathLike = None
) -> list[int]:
    """The source ranks whose files ``rank_id`` of the destination is made from, descending; only those needed.

    A strategy of ``None`` is one full checkpoint, on rank 0. Raises ``TypeError`` for arguments of other types,
    ``ValueError`` for a strategy that cannot be read, a rank outside the destination, or strategies that do not fit.
    """
    _check_type("rank_id", rank_id, int)
    before = open_strategy("src_strategy_file", src_strategy_file)
    after = open_strategy("dst_strategy_file", dst_strategy_file)

    # one full checkpoint is one file
    if before is None:
        _check_rank(rank_id, None if after is None else on_paper(after, None)[0])
        return [0]

    src, dst = on_paper(before, after)
    _check_rank(rank_id, dst)
    target = single(src) if dst is None else dst
    found = takes(src, target, match(src, target), rank_id)
    return sorted({take.rank for take in found}, reverse=True)


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, Any],
    save_checkpoint_file_name: str,
    src_strategy_file: PathLike = None,
    dst_strategy_file: PathLike = None,
) -> None:
    """Write the file of ``rank_id`` of the destination, from source files by rank: at least those of the rank list.

    Raises as ``rank_list_for_transform``; ``ValueError`` also for a source file that is missing or does not fit.
    """
    # the arguments, as MindSpore looks at them
    _check_type("rank_id", rank_id, int)
    if not isinstance(checkpoint_files_map, dict):
        raise TypeError(f"checkpoint_files_map: expected a dict, got {type(checkpoint_files_map).__name__}")
    paths = {rank: _source(rank, path) for rank, path in sorted(checkpoint_files_map.items())}
    _check_type("save_checkpoint_file_name", save_checkpoint_file_name, str)
    path = Path(save_checkpoint_file_name)
    _check_suffix("save_checkpoint_file_name", path)
    src = open_strategy("src_strategy_file", src_strategy_file)
    dst = open_strategy("dst_strategy_file", dst_strategy_file)

    # the file, under its name when it is whole
    transform = _transform(paths, src, dst, rank_id)
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
    output_format: str | None = None,
) -> None:
    """Write ``rank_<k>/<ckpt_prefix><k>.<output_format>`` for every rank; the destination appears when complete.

    ``output_format`` is ``ckpt`` or ``safetensors``; ``None``: that of the source.

    The source has ``rank_<k>`` folders; of several files in one, that of the highest step counts. It may be a
    checkpoint of ours, which brings its strategy along. ``process_num`` ranks are written at a time, by threads; one
    more syncs them. Everything is checked first. Raises ``TypeError`` and ``ValueError`` as the functions above,
    ``NotADirectoryError`` for a source or destination that is no folder, ``FileExistsError`` for one not empty.
    """
    # the arguments, as MindSpore looks at them
    source = _folder("src_checkpoints_dir", src_checkpoints_dir)
    target = _folder("dst_checkpoints_dir", dst_checkpoints_dir)
    _check_type("ckpt_prefix", ckpt_prefix, str)
    if Path(f"{ckpt_prefix}0").name != f"{ckpt_prefix}0" or "\0" in ckpt_prefix:
        raise ValueError(f"ckpt_prefix: {ckpt_prefix!r} leaves the rank's folder; give the start of a file name")
    _check_type("process_num", process_num, int)
    if process_num < 1:
        raise ValueError(f"process_num: {process_num} is not at least 1")
    _check_format(output_format)
    src = open_strategy("src_strategy_file", src_strategy_file)
    dst = open_strategy("dst_strategy_file", dst_strategy_file)

    # the source, then where it goes
    made = of_checkpoint(source, src, dst) if is_checkpoint(source) else of_rank_folders(source, src, dst)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"dst_checkpoints_dir: {target} is not a folder")
    check_apart(source, target)
    check_empty(target)
    suffix = made.suffix if output_format is None else f".{output_format}"
    write_ranks(made, target, ckpt_prefix, suffix, workers=process_num)


def write_ranks(
    made: RankConversion,
    target: Path,
    prefix: str,
    suffix: str,
    *,
    workers: int,
    texts: Mapping[str, str] | None = None,
) -> int:
    """The folder ``target``, there when complete, with ``texts`` by file name; returns the bytes of the rank files."""
    end = suffix if made.stage is None else f"_part{made.stage}{suffix}"
    with fresh(target) as new, WriteBehind() as behind, ThreadPoolExecutor(workers) as pool:
        ranks = range(made.after.grid.size)
        homes = [new / f"rank_{rank}" for rank in ranks]
        for home in homes:
            home.mkdir()
        outputs = [home / f"{prefix}{rank}{end}" for rank, home in enumerate(homes)]
        list(pool.map(partial(made.write, behind=behind), ranks, outputs))
        behind.wait()

        # the names of the files, after the files
        for name, content in (texts or {}).items():
            write_text(new / name, content)
        for folder in (*homes, new):
            sync(folder)
        return sum(path.stat().st_size for path in outputs)


def whole_tensors(
    src_checkpoints_dir: Path, src_strategy_file: Path, *, verify: bool = True
) -> tuple[RankFiles, Callable[[], HeldTensors]]:
    """What ``transform_checkpoints`` makes of these, without a strategy to go to; raises as it does.

    The second makes it, each time for one thread. ``verify``: False where heads alone shall be read.
    """
    src = open_strategy("src_strategy_file", src_strategy_file)
    transform = _transform(rank_paths(src_checkpoints_dir), src, None, verify=verify)
    return transform.files, partial(transform.tensors, 0)


def of_rank_folders(
    folder: Path, src: StrategyInput | None, dst: StrategyInput | Layouts | None, *, verify: bool = True
) -> RankConversion:
    """Of ``rank_<k>`` folders as other programs write them."""
    paths = rank_paths(folder)
    transform = _transform(paths, src, dst, verify=verify)
    first = next(iter(paths.values()))
    return RankConversion(transform.after, transform.write, first.suffix, transform.stage)


def of_checkpoint(
    folder: Path, src: StrategyInput | None, dst: StrategyInput | Layouts | None, trust: Trust = ANYONE
) -> RankConversion:
    """Of a checkpoint of ours, which brings its strategy along."""
    checkpoint = open_checkpoint(folder, trust)
    if src is not None and of_whole(src, whole_specs(checkpoint.strategy)).meaning != checkpoint.strategy.meaning:
        raise ValueError(
            f"src_strategy_file: not the strategy that {folder} was saved with; give None to take that one"
        )
    after = _after(dst, checkpoint.strategy)
    names = match(checkpoint.strategy, after)
    Reader(checkpoint).check_headers()

    def write(rank: int, path: Path, behind: WriteBehind) -> None:
        reader = Reader(checkpoint)
        boxes = held_boxes(after, rank)
        write_held(path, after, rank, lambda name: reader.chunks(names[name], boxes[name]), behind=behind)

    return RankConversion(after, write, ".safetensors")


def _after(dst: StrategyInput | Layouts | None, before: Strategy) -> Strategy:
    """The layout asked for: every tensor whole where none is."""
    if dst is None:
        return single(before)
    if isinstance(dst, Strategy | StrategyFile):
        return of_whole(dst, whole_specs(before))
    return dst(before)


def _transform(
    paths: Mapping[int, Path],
    src: StrategyInput | None,
    to: StrategyInput | Layouts | None,
    rank: int | None = None,
    *,
    verify: bool = True,
) -> RankFileTransform:
    """Everything checked, without ``verify`` no checksums; for one ``rank`` the files that it needs are enough."""
    if src is None and to is None:
        raise ValueError("src_strategy_file and dst_strategy_file are both None: there is no other layout to write")
    dst = to if isinstance(to, Strategy | StrategyFile) else None
    files = {at: open_source(path, verify=verify) for at, path in paths.items()}
    slices = _slices(files)

    # for one rank alone, only what its files are about
    if rank is not None:
        _check_enough(src, dst, rank, files)
        src = only_names(src, slices.keys())
        dst = only_names(dst, slices.keys())

    # how the source lies in its files
    before = _full(files, dst) if src is None else of_slices(src, slices, _stages(src, dst, paths))
    _check_ranks(paths, before, all_needed=rank is None)

    # one stage of a pipeline becomes the same stage of the destination
    stage = by_stage(src, dst)
    if stage is not None and dst is not None:
        files = {at: file for at, file in files.items() if before.held(at)}
        dst = only_names(dst, listed(src))

    after = _after(to if dst is None else dst, before)
    names = match(before, after)
    return RankFileTransform(RankFiles(files, before, listed(dst), own=src is not None), after, names, stage)


def _check_ranks(paths: Mapping[int, Path], before: Strategy, *, all_needed: bool) -> None:
    """Raises ``ValueError`` for a folder of a rank that the source does not have, or, if ``all_needed``, for none."""
    world = before.grid.size
    outside = [at for at in paths if not 0 <= at < world]
    if outside:
        raise ValueError(f"{paths[outside[0]]}: rank {outside[0]} is not in the source strategy's world of {world}")
    lost = [at for at in range(world) if at not in paths and before.held(at)] if all_needed else []
    if lost:
        raise ValueError(f"the source strategy has {world} ranks; no folder for {_ranks_text(lost)}")


def _check_enough(
    src: StrategyInput | None, dst: StrategyInput | None, rank: int, files: Mapping[int, RankSource]
) -> None:
    """Whether the ``files`` have all that ``rank`` of the destination is made from."""
    if src is None:
        _check_rank(rank, None if dst is None else on_paper(dst, None)[0])
        return
    before, after = on_paper(src, dst)
    _check_rank(rank, after)
    target = single(before) if after is None else after
    takes(before, target, match(before, target), rank, files)


def _full(files: Mapping[int, RankSource], dst: StrategyInput | None) -> Strategy:
    if [*files] != [0]:
        raise ValueError(
            f"src_strategy_file is None: a full checkpoint is on rank 0 alone, not on {_ranks_text(files)}"
        )
    return whole_strategy(files[0], listed(dst))


def _slices(files: Mapping[int, RankSource]) -> dict[str, TensorSpec]:
    """By name, as the first rank that has it has it; that others agree is checked against the strategy."""
    return {name: spec for file in [*files.values()][::-1] for name, spec in file.specs.items()}


def _stages(src: StrategyInput, dst: StrategyInput | None, paths: Collection[int]) -> int | None:
    """How many stages the pipeline of a single-stage source has, as far as the ranks' folders tell."""
    stage = by_stage(src, dst)
    if stage is None or not isinstance(src, StrategyFile) or not src.layouts:
        return None
    ranks_of_a_stage = next(iter(src.layouts.values())).ranks
    ranks = max(paths, default=0) + 1
    return max(stage + 1, -(-ranks // ranks_of_a_stage))


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


def _check_rank(rank: int, dst: Strategy | None) -> None:
    world = 1 if dst is None else dst.grid.size
    if not 0 <= rank < world:
        raise ValueError(f"rank_id: {rank} is not in the destination's world of {world}")


def _check_suffix(key: str, path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{key}: {path} does not end in {' or '.join(SUFFIXES)}")


def _check_format(name: str | None) -> None:
    if name is not None and f".{name}" not in SUFFIXES:
        raise ValueError(f"output_format: {name!r} is not known; give safetensors or ckpt")


def _ranks_text(ranks: Mapping[int, Any] | list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
