"""Checkpoints of any program, rewritten in another layout: as one of ours, or as one file a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from launcher.checkpoint.atomic_folder import check_apart, check_destination
from launcher.checkpoint.chunked import gathered
from launcher.checkpoint.foreign.import_tensors import import_whole
from launcher.checkpoint.foreign.read import Foreign, foreign, form_of
from launcher.checkpoint.layout.strategy import Entry, Strategy, match
from launcher.checkpoint.layout.strategy_file import text
from launcher.checkpoint.mindspore.rank_conversion import (
    Layouts,
    RankConversion,
    laid_out,
    of_checkpoint,
    of_rank_folders,
    write_ranks,
)
from launcher.checkpoint.mindspore.rank_files import held_boxes, write_held
from launcher.checkpoint.mindspore.rank_folders import rank_paths
from launcher.checkpoint.mindspore.rank_source import open_source
from launcher.checkpoint.mindspore.strategy_input import StrategyInput, by_stage, open_strategy
from launcher.checkpoint.tensorfile.write_behind import WriteBehind
from launcher.checkpoint.transform import PEAK, Report, is_checkpoint
from launcher.plan.values.layout import Layout
from launcher.plan.values.trust import ANYONE, Trust

STRATEGY = "strategy.json"
"""How the rank files beside it are laid out."""


@dataclass(frozen=True)
class RankFormat:
    """One file a rank, ``rank_<k>/<prefix><k>.<suffix>``; with ``_part<stage>`` of a source of one stage."""

    suffix: Literal["safetensors", "ckpt"]
    prefix: str


def is_foreign(path: Path, strategy: str | None) -> bool:
    """Whether ``path`` is what ``foreign`` reads. A checkpoint of ours that was never finished is not."""
    if is_checkpoint(path) or not path.exists():
        return False
    if strategy is None and any(path.glob("rank_*/model.safetensors")):
        return False
    try:
        form_of(path)
    except ValueError:
        return False
    return True


def to_checkpoint(
    src: Path,
    dst: Path,
    to: StrategyInput | Layouts,
    strategy: str | None,
    *,
    overwrite: bool = False,
    key: str | None = None,
    workers: int = 1,
) -> Report:
    """What ``foreign`` reads of ``src`` as the checkpoint ``dst`` of step 0. Raises as ``transform`` does.

    ``left`` of the report are the entries that are no tensors.
    """
    check_apart(src, dst)
    found, target = aimed(src, to, strategy)
    wholes = [found.whole() for _ in range(workers)]
    done = import_whole(wholes[0], dst, target, {"step": 0}, overwrite=overwrite, key=key, beside=wholes[1:])
    return replace(done, left=found.others)


def aimed(
    src: Path, to: StrategyInput | Layouts, strategy: str | None, *, verify: bool = True
) -> tuple[Foreign, Strategy]:
    """What is at ``src``, and the layout asked for, with whole copies of what the strategies do not list."""
    stage = None
    if not callable(to) and strategy is not None and src.is_dir():
        files = {rank: open_source(path, verify=False).specs for rank, path in rank_paths(src).items()}
        stage = by_stage(_given(strategy), to, files)
    if stage is not None:
        text = f"the source is stage {stage} of a pipeline alone, which is no whole checkpoint"
        raise ValueError(f"{text}; rank files have place for it: give format ckpt or safetensors")

    found = foreign(src, _path(strategy), verify=verify)
    target = laid_out(to, found.strategy)
    match(found.strategy, target)

    # what the strategies do not list, whole on every rank
    specs = found.whole().specs if found.loose else {}
    loose = {
        n: Entry(Layout(target.grid, specs[n].shape, ((),) * len(specs[n].shape)), specs[n].dtype)
        for n in found.loose
    }
    return found, Strategy(target.grid, {**target.entries, **loose})


def to_rank_files(
    src: Path,
    dst: Path,
    to: StrategyInput | Layouts,
    form: RankFormat,
    strategy: str | None = None,
    *,
    overwrite: bool = False,
    workers: int = 1,
    trust: Trust = ANYONE,
) -> Report:
    """As MindSpore's ``transform_checkpoints``, from ``src`` of any kind; the layout is beside the files."""
    check_rank_places(src, dst, overwrite)
    made = writer(src, to, strategy, trust=trust)
    after = made.after
    texts = {STRATEGY: text(after, tuple(range(after.stages)))}
    written = write_ranks(made, dst, form.prefix, f".{form.suffix}", workers=workers, texts=texts)
    return Report(dst, after.grid.size, bytes_read=written, bytes_written=written, peak=workers * PEAK)


def writer(
    src: Path,
    to: StrategyInput | Layouts,
    strategy: str | None,
    *,
    trust: Trust = ANYONE,
    verify: bool = True,
) -> RankConversion:
    """What makes the file of a rank; everything is checked, checksums of others' files only if ``verify``."""
    if not is_foreign(src, strategy):
        if strategy is not None:
            raise ValueError(
                f"{src}: a checkpoint of ours, which says how it is laid out; leave src_strategy out"
            )
        return of_checkpoint(src, None, to, trust)
    if src.is_dir() and form_of(src) == "mindspore":
        return of_rank_folders(src, _given(strategy), to, verify=verify)

    # whole tensors, of which each rank gets its pieces
    found = foreign(src, _path(strategy), verify=verify)
    after = laid_out(to, found.strategy)
    names = match(found.strategy, after)

    def write(rank: int, path: Path, behind: WriteBehind) -> None:
        source = found.whole()
        boxes = held_boxes(after, rank)

        def chunks(name: str) -> Iterator[memoryview]:
            return gathered(boxes[name], after.entries[name].dtype, partial(source.fill, names[name]))

        write_held(path, after, rank, chunks, behind=behind)

    return RankConversion(after, write)


def check_rank_places(src: Path, dst: Path, overwrite: bool) -> None:
    """Raises ``ValueError`` and ``FileExistsError`` as ``to_rank_files`` does, whatever is in ``src``."""
    check_apart(src, dst)
    check_free_for_ranks(dst, overwrite)


def check_free_for_ranks(dst: Path, overwrite: bool) -> None:
    """The same without knowing the source."""
    check_destination(dst, overwrite, lambda path: any(path.glob("rank_*")), "folder of rank files")


def _given(strategy: str | None) -> StrategyInput | None:
    return open_strategy("src_strategy", strategy)


def _path(strategy: str | None) -> Path | None:
    return None if strategy is None else Path(strategy)
