"""Rank files in one layout, and checkpoints of ours, rewritten as rank files in another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher.checkpoint.atomic_folder import fresh
from launcher.checkpoint.layout.derived import followed
from launcher.checkpoint.layout.strategy import Strategy, match, single
from launcher.checkpoint.mindspore.formats import StrategyFile
from launcher.checkpoint.mindspore.rank_files import (
    HeldTensors,
    RankFiles,
    full_copy,
    held_boxes,
    unlisted,
    whole_strategy,
    write_held,
)
from launcher.checkpoint.mindspore.rank_folders import rank_paths
from launcher.checkpoint.mindspore.rank_source import RankSource, open_source
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
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.trust import ANYONE, Trust

Layouts = Callable[[Strategy], Strategy]
"""A layout that is worked out from that of the source."""


@dataclass(frozen=True)
class RankFileTransform:
    """What the source's ``files`` become: the layout ``after``; ``names`` are the source's by its names.

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
        self.files.write(self.after, self.names, rank, path, behind=behind)


@dataclass(frozen=True)
class RankConversion:
    """``write(rank, path, behind=...)`` makes the file of a rank of ``after``.

    ``stage`` is the one that the source is of, where it is one of several.
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
    """Write ``target``, there when complete, and ``texts`` by file name; returns the rank files' bytes."""
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
    transform = file_transform(rank_paths(src_checkpoints_dir), src, None, verify=verify)
    return transform.files, partial(transform.tensors, 0)


def of_rank_folders(
    folder: Path, src: StrategyInput | None, dst: StrategyInput | Layouts | None, *, verify: bool = True
) -> RankConversion:
    """Of ``rank_<k>`` folders as other programs write them."""
    transform = file_transform(rank_paths(folder), src, dst, verify=verify)
    return RankConversion(transform.after, transform.write, transform.stage)


def of_checkpoint(
    folder: Path, src: StrategyInput | None, dst: StrategyInput | Layouts | None, trust: Trust = ANYONE
) -> RankConversion:
    """Of a checkpoint of ours, which brings its strategy along."""
    checkpoint = open_checkpoint(folder, trust)
    before = checkpoint.strategy
    if src is not None and of_whole(src, whole_specs(before)).meaning != before.meaning:
        raise ValueError(
            f"src_strategy_file: not the strategy that {folder} was saved with; give None to take that one"
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
    """The requested layout of all tensors of ``before``: full tensors on one rank where none is."""
    if dst is None:
        return single(before)
    if isinstance(dst, Strategy | StrategyFile):
        return followed(of_whole(dst, whole_specs(before)), before)
    return dst(before)


def file_transform(
    paths: Mapping[int, Path],
    src: StrategyInput | None,
    to: StrategyInput | Layouts | None,
    rank: int | None = None,
    *,
    verify: bool = True,
) -> RankFileTransform:
    """Everything checked, checksums if ``verify``; for one ``rank`` the files that it needs are enough."""
    if src is None and to is None:
        raise ValueError(
            "src_strategy_file and dst_strategy_file are both None: there is no other layout to write"
        )
    dst = to if isinstance(to, Strategy | StrategyFile) else None
    files = {at: open_source(path, verify=verify) for at, path in paths.items()}
    slices = _slices(files)

    # for one rank alone, only what its files are about
    if rank is not None:
        _check_enough(src, dst, rank, files)
        src = only_names(src, slices.keys())
        dst = only_names(dst, slices.keys())

    # how the source lies in its files
    stage = by_stage(src, dst, {at: file.specs for at, file in files.items()})
    if src is None:
        # each rank of a data-parallel training has the full checkpoint: one is read
        files = {0: full_copy("src_strategy_file is None", files, verify=verify)}
        before = whole_strategy(files[0], listed(dst))
    else:
        before = of_slices(src, slices, _stages(src, stage, paths))
    _check_ranks(files, before, paths, all_needed=rank is None)

    # one stage of a pipeline becomes the same stage of the destination
    if stage is not None and dst is not None:
        files = {at: file for at, file in files.items() if before.held(at)}
        dst = only_names(dst, listed(src))

    # what the source strategy does not list has full copies on the ranks
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
    """Raises ``ValueError`` for a folder of no rank of the source or, if ``all_needed``, a missing one."""
    world = before.grid.size
    outside = [at for at in files if not 0 <= at < world]
    if outside:
        raise ValueError(
            f"{paths[outside[0]]}: rank {outside[0]} is not in the source strategy's world of {world}"
        )
    lost = [at for at in range(world) if all_needed and at not in files and before.held(at)]
    if lost:
        raise ValueError(f"the source strategy has {world} ranks; no folder for {_ranks_text(lost)}")


def _check_enough(
    src: StrategyInput | None, dst: StrategyInput | None, rank: int, files: Mapping[int, RankSource]
) -> None:
    """Whether the ``files`` have all that ``rank`` of the destination is made from."""
    if src is None:
        full = None if dst is None else on_paper(dst, None)[0]
        check_rank(rank, full)
        return

    before, target = sides(src, dst)
    check_rank(rank, target)
    takes(before, target, match(before, target), rank, among=files)


def sides(src: StrategyInput, dst: StrategyInput | None) -> tuple[Strategy, Strategy]:
    """Both layouts without a checkpoint, with the tensors that both list or that ``dst`` alone leaves out.

    What ``src`` leaves out has full copies on its ranks.
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
    return before, followed(after, before)


def _slices(files: Mapping[int, RankSource]) -> dict[str, TensorSpec]:
    """By name, as the first rank that has it has it; that others agree is checked against the strategy."""
    return {name: spec for file in [*files.values()][::-1] for name, spec in file.specs.items()}


def _stages(src: StrategyInput, stage: int | None, paths: Collection[int]) -> int | None:
    """How many stages the pipeline of a source of one ``stage`` has, as far as the ranks' folders tell."""
    if stage is None or not isinstance(src, StrategyFile) or not src.layouts:
        return None
    ranks_of_a_stage = next(iter(src.layouts.values())).ranks
    ranks = max(paths, default=0) + 1
    return max(stage + 1, -(-ranks // ranks_of_a_stage))


def check_rank(rank: int, dst: Strategy | None) -> None:
    """Raises ``ValueError`` unless ``dst`` has ``rank``; without a strategy it is one full checkpoint."""
    world = 1 if dst is None else dst.grid.size
    if not 0 <= rank < world:
        raise ValueError(f"rank_id: {rank} is not in the destination's world of {world}")


def _ranks_text(ranks: Mapping[int, Any] | list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
