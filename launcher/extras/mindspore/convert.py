"""Rewrites rank files, or a checkpoint of ours, as rank files in another layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher.checkpoint.foreign.recognize_strategy import open_strategy
from launcher.checkpoint.layout.derive_strategy import with_left_out_tensors
from launcher.checkpoint.layout.strategy import Strategy, match, single, tensor_specs
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.store import fresh
from launcher.checkpoint.tensorfile.disk import WriteBehind, sync, write_text
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.extras.mindspore.layouts_without_checkpoint import on_paper
from launcher.extras.mindspore.rank_files import (
    HeldTensors,
    RankFiles,
    RankSource,
    full_copy,
    held_boxes,
    open_source,
    rank_paths,
    strategy_of_one_file,
    takes,
    unlisted,
    write_held,
)
from launcher.extras.mindspore.shapes_of_slices import of_full_tensors, strategy_with_shapes_of_slices
from launcher.extras.mindspore.strategy import StrategyFile
from launcher.extras.mindspore.strategy_argument import StrategyInput, by_stage, listed, only_names
from launcher.plan.resolve.encryption import ANYONE, Trust
from launcher.plan.values.tensor_spec import TensorSpec

Layouts = Callable[[Strategy], Strategy]
"""Computes the layout of the destination from that of the source."""


@dataclass(frozen=True)
class RankFileTransform:
    """A transform of rank files to the layout ``after``.

    ``names`` maps each name in ``after`` to the name in the source. ``stage`` is the source's pipeline stage
    if the source is one stage of several.
    """

    files: RankFiles
    after: Strategy
    names: Mapping[str, str]
    stage: int | None

    def tensors(self, rank: int) -> HeldTensors:
        """Returns the tensors that ``rank`` of the destination holds, for use by one thread."""
        return self.files.tensors_of(self.after, self.names, rank)

    def write(self, rank: int, path: Path, behind: WriteBehind | None = None) -> None:
        """Writes the file of ``rank`` of the destination to ``path``."""
        self.files.write(self.after, self.names, rank, path, behind=behind)


@dataclass(frozen=True)
class RankConversion:
    """A conversion of any source to rank files: ``write(rank, path, behind=...)`` writes a rank of ``after``.

    ``stage`` is the source's pipeline stage if the source is one stage of several.
    """

    after: Strategy
    write: Callable[..., None]
    stage: int | None = None


def write_ranks(
    made: RankConversion,
    target: Path,
    prefix: str,
    suffix: str,
    *,
    workers: int,
    texts: Mapping[str, str] | None = None,
) -> int:
    """Writes the folder ``target``, which appears when it is complete; returns the size of all rank files.

    ``texts`` are further files of the folder, by name. The names of rank files begin with ``prefix`` and end
    with ``suffix``; ``workers`` files are written at a time.
    """
    end = suffix if made.stage is None else f"_part{made.stage}{suffix}"
    with fresh(target) as new, WriteBehind() as behind, ThreadPoolExecutor(workers) as pool:
        ranks = range(made.after.grid.size)
        homes = [new / f"rank_{rank}" for rank in ranks]
        for home in homes:
            make_folder(home)
        outputs = [home / f"{prefix}{rank}{end}" for rank, home in enumerate(homes)]
        list(pool.map(partial(made.write, behind=behind), ranks, outputs))
        behind.wait()

        # sync the folders' entries after the files themselves
        for name, content in (texts or {}).items():
            write_text(new / name, content)
        for folder in (*homes, new):
            sync(folder)
        return sum(path.stat().st_size for path in outputs)


def open_full_tensors(
    src_checkpoints_dir: Path, src_strategy_file: Path, *, verify: bool = True
) -> tuple[RankFiles, Callable[[], HeldTensors]]:
    """Opens rank files as full tensors; raises as ``transform_checkpoints`` does.

    Returns the files, and a function that returns the full tensors for use by one thread. Without ``verify``
    only the files' headers are read.
    """
    src = open_strategy("src_strategy_file", src_strategy_file)
    transform = file_transform(rank_paths(src_checkpoints_dir), src, None, verify=verify)
    return transform.files, partial(transform.tensors, 0)


def of_rank_folders(
    folder: Path, src: StrategyInput | None, dst: StrategyInput | Layouts | None, *, verify: bool = True
) -> RankConversion:
    """Returns the conversion of ``rank_<k>`` folders that another program wrote."""
    transform = file_transform(rank_paths(folder), src, dst, verify=verify)
    return RankConversion(transform.after, transform.write, transform.stage)


def of_checkpoint(
    folder: Path, src: StrategyInput | None, dst: StrategyInput | Layouts | None, trust: Trust = ANYONE
) -> RankConversion:
    """Returns the conversion of a checkpoint of ours, which contains its strategy.

    Raises ``ValueError`` if ``src`` is given and is not the checkpoint's strategy.
    """
    checkpoint = open_checkpoint(folder, trust)
    before = checkpoint.strategy
    if src is not None and of_full_tensors(src, tensor_specs(before)).meaning != before.meaning:
        raise ValueError(
            f"src_strategy_file: not the strategy that {folder} was saved with; give None to use that one"
        )
    after = laid_out(dst, before)
    names = match(before, after)
    Reader(checkpoint).check_headers()

    def write(rank: int, path: Path, behind: WriteBehind) -> None:
        reader = Reader(checkpoint)
        boxes = held_boxes(after, rank)
        write_held(path, after, rank, lambda name: reader.chunks(names[name], boxes[name]), behind=behind)

    return RankConversion(after, write)


def laid_out(dst: StrategyInput | Layouts | None, before: Strategy) -> Strategy:
    """Returns the requested layout of all tensors of ``before``; for ``None``, full tensors on one rank."""
    if dst is None:
        return single(before)
    if isinstance(dst, Strategy | StrategyFile):
        return with_left_out_tensors(of_full_tensors(dst, tensor_specs(before)), before)
    return dst(before)


def file_transform(
    paths: Mapping[int, Path],
    src: StrategyInput | None,
    to: StrategyInput | Layouts | None,
    rank: int | None = None,
    *,
    verify: bool = True,
) -> RankFileTransform:
    """Checks everything and returns the transform; checksums are checked if ``verify``.

    Args:
        paths: The source's files by rank. If ``rank`` is given, only those that it needs are required.
        src: The source's strategy; ``None``: every rank has the same full checkpoint.
        to: The destination's strategy, or how to compute it; ``None``: one full checkpoint.
        rank: The only rank of the destination that will be written.
        verify: Read files in full to check their checksums, and that copies of a tensor are equal.
    """
    if src is None and to is None:
        raise ValueError(
            "src_strategy_file and dst_strategy_file are both None: there is no other layout to write"
        )
    dst = to if isinstance(to, Strategy | StrategyFile) else None
    files = {at: open_source(path, verify=verify) for at, path in paths.items()}
    slices = _specs(files)

    # for one rank, keep only the tensors that the given files have
    if rank is not None:
        _check_enough(src, dst, rank, files)
        src = only_names(src, slices.keys())
        dst = only_names(dst, slices.keys())

    # the layout of the source
    stage = by_stage(src, dst, {at: file.specs for at, file in files.items()})
    if src is None:
        # every data-parallel rank has the same full checkpoint, so one of them is read
        files = {0: full_copy("src_strategy_file is None", files, verify=verify)}
        before = strategy_of_one_file(files[0], listed(dst))
    else:
        before = strategy_with_shapes_of_slices(src, slices, _stages(src, stage, paths))
    _check_ranks(files, before, paths, all_needed=rank is None)

    # one stage of a pipeline becomes the same stage of the destination
    if stage is not None and dst is not None:
        files = {at: file for at, file in files.items() if before.entries_of(at)}
        dst = only_names(dst, listed(src))

    # tensors that the source strategy does not list are full copies on their ranks
    replicated = unlisted({at: file.specs for at, file in files.items()}, before, listed(dst))
    before = Strategy(before.grid, {**before.entries, **replicated})
    after = laid_out(to if dst is None else dst, before)
    names = match(before, after)
    own = src is not None
    opened = RankFiles(files, before, listed(dst), own=own, replicated=[*replicated], verify=verify)
    return RankFileTransform(opened, after, names, stage)


def _check_ranks(
    files: Collection[int], before: Strategy, paths: Mapping[int, Path], *, all_needed: bool
) -> None:
    """Raises ``ValueError`` if a folder's rank is not in the source or, if ``all_needed``, one is missing."""
    world = before.grid.size
    outside = [at for at in files if not 0 <= at < world]
    if outside:
        raise ValueError(
            f"{paths[outside[0]]}: rank {outside[0]} is not in the source strategy's world of {world}"
        )
    lost = [at for at in range(world) if all_needed and at not in files and before.entries_of(at)]
    if lost:
        raise ValueError(f"the source strategy has {world} ranks; no folder for {_ranks_text(lost)}")


def _check_enough(
    src: StrategyInput | None, dst: StrategyInput | None, rank: int, files: Mapping[int, RankSource]
) -> None:
    """Raises ``ValueError`` unless ``files`` contain all pieces that ``rank`` of the destination needs."""
    if src is None:
        full = None if dst is None else on_paper(dst, None)[0]
        check_rank(rank, full)
        return

    before, target = sides(src, dst)
    check_rank(rank, target)
    takes(before, target, match(before, target), rank, among=files)


def sides(src: StrategyInput, dst: StrategyInput | None) -> tuple[Strategy, Strategy]:
    """Returns the layouts of source and destination from the strategies alone, without a checkpoint.

    Both have the tensors of ``src``; those that ``dst`` leaves out are laid out by
    ``with_left_out_tensors``. If ``dst`` lists more tensors, these are dropped: the ranks of ``src`` have
    full copies of them.
    """
    before, after = on_paper(src, dst)
    if after is None:
        return before, single(before)
    if before.named.keys() < after.named.keys():
        kept = {
            name: entry
            for name, entry in after.entries.items()
            if not before.named.keys().isdisjoint((name, *entry.aliases))
        }
        after = Strategy(after.grid, kept)
    return before, with_left_out_tensors(after, before)


def _specs(files: Mapping[int, RankSource]) -> dict[str, TensorSpec]:
    """Returns each tensor's spec, by name, from the first rank that has it.

    The specs of the other ranks are checked against the strategy later.
    """
    return {name: spec for file in [*files.values()][::-1] for name, spec in file.specs.items()}


def _stages(src: StrategyInput, stage: int | None, paths: Collection[int]) -> int | None:
    """Returns the number of pipeline stages of a source that is one ``stage``, as far as its folders show."""
    if stage is None or not isinstance(src, StrategyFile) or not src.layouts:
        return None
    ranks_of_a_stage = next(iter(src.layouts.values())).ranks
    ranks = max(paths, default=0) + 1
    return max(stage + 1, -(-ranks // ranks_of_a_stage))


def check_rank(rank: int, dst: Strategy | None) -> None:
    """Raises ``ValueError`` unless ``dst`` has ``rank``; a ``dst`` of ``None`` has rank 0 alone."""
    world = 1 if dst is None else dst.grid.size
    if not 0 <= rank < world:
        raise ValueError(f"rank_id: {rank} is not in the destination's world of {world}")


def _ranks_text(ranks: Mapping[int, Any] | list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
