"""Rewrites a checkpoint of any program as one file per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from launcher.checkpoint.box_bytes import stream_box
from launcher.checkpoint.foreign.import_checkpoint import foreign, form_of, is_foreign
from launcher.checkpoint.foreign.recognize_strategy import open_strategy
from launcher.checkpoint.layout.strategy import match
from launcher.checkpoint.layout.strategy_file import text
from launcher.checkpoint.store import check_apart, check_destination
from launcher.checkpoint.tensorfile.disk import WriteBehind
from launcher.checkpoint.transform import PEAK, Report
from launcher.optional import mindspore
from launcher.plan.resolve.encryption import ANYONE, Trust

STRATEGY = "strategy.json"
"""The file next to rank files that describes their layout."""


@dataclass(frozen=True)
class RankFormat:
    """The names of rank files: ``rank_<k>/<prefix><k>.<suffix>``.

    ``_part<stage>`` is added to the prefix if the source is only one pipeline stage.
    """

    suffix: Literal["safetensors", "ckpt"]
    prefix: str


def to_rank_files(
    src: Path,
    dst: Path,
    to: mindspore.StrategyInput | mindspore.Layouts,
    form: RankFormat,
    strategy: str | None = None,
    *,
    overwrite: bool = False,
    workers: int = 1,
    trust: Trust = ANYONE,
) -> Report:
    """Writes ``src``, in any format, as one file per rank, as MindSpore's ``transform_checkpoints`` does.

    The layout is written to ``strategy.json`` next to the rank folders.
    """
    check_rank_places(src, dst, overwrite)
    made = writer(src, to, strategy, trust=trust)
    after = made.after
    texts = {STRATEGY: text(after, tuple(range(after.stages)))}
    written = mindspore.write_ranks(made, dst, form.prefix, f".{form.suffix}", workers=workers, texts=texts)
    return Report(dst, after.grid.size, bytes_read=written, bytes_written=written, peak=workers * PEAK)


def writer(
    src: Path,
    to: mindspore.StrategyInput | mindspore.Layouts,
    strategy: str | None,
    *,
    trust: Trust = ANYONE,
    verify: bool = True,
) -> mindspore.RankConversion:
    """Returns the conversion that writes the file of each rank.

    Everything is checked first, except that checksums of foreign files are checked only if ``verify``.
    """
    if not is_foreign(src, strategy):
        if strategy is not None:
            raise ValueError(
                f"{src}: a checkpoint of this launcher, which records its layout; remove src_strategy"
            )
        return mindspore.of_checkpoint(src, None, to, trust)
    if src.is_dir() and form_of(src) == "mindspore":
        return mindspore.of_rank_folders(src, open_strategy("src_strategy", strategy), to, verify=verify)

    # the source has full tensors; each rank reads its pieces of them
    checkpoint = foreign(src, None if strategy is None else Path(strategy), verify=verify)
    after = mindspore.laid_out(to, checkpoint.strategy)
    names = match(checkpoint.strategy, after)

    def write(rank: int, path: Path, behind: WriteBehind) -> None:
        source = checkpoint.read_full()
        boxes = mindspore.held_boxes(after, rank)

        def chunks(name: str) -> Iterator[memoryview]:
            return stream_box(boxes[name], after.entries[name].dtype, partial(source.fill, names[name]))

        mindspore.write_held(path, after, rank, chunks, behind=behind)

    return mindspore.RankConversion(after, write)


def check_rank_places(src: Path, dst: Path, overwrite: bool) -> None:
    """Raises ``ValueError`` and ``FileExistsError`` as ``to_rank_files`` does; it does not read ``src``."""
    check_apart(src, dst)
    check_free_for_ranks(dst, overwrite)


def check_free_for_ranks(dst: Path, overwrite: bool) -> None:
    """Raises as ``check_rank_places`` does for ``dst`` alone."""
    check_destination(dst, overwrite, lambda path: any(path.glob("rank_*")), "folder of rank files")
