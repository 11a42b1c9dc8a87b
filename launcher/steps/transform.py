"""``transform``: a checkpoint in the layout that the step names, without torch."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint.atomic_folder import check_destination
from launcher.checkpoint.layout.derived import followed, target_strategy
from launcher.checkpoint.layout.strategy import Strategy, match
from launcher.checkpoint.mindspore.rank_conversion import Layouts
from launcher.checkpoint.mindspore.strategy_input import StrategyInput, of_whole, open_strategy, whole_specs
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.transform import Report, check_places, is_checkpoint, transform
from launcher.checkpoint.transform_foreign import (
    RankFormat,
    aimed,
    check_free_for_ranks,
    check_rank_places,
    is_foreign,
    to_checkpoint,
    to_rank_files,
    writer,
)
from launcher.checkpoint.transform_plan import plan_transform
from launcher.job.schema.steps import Transform
from launcher.plan.cost.memory import bytes_text
from launcher.plan.settings.saving import ANYONE, Trust
from launcher.plan.values.text import many

PREFIX = "checkpoint_"
"""Of the names of rank files, where none is asked for."""


def target(step: Transform, src: Strategy) -> Strategy:
    """The layout asked for, by a strategy file, which must be of the tensors of ``src``, or in the job's words."""
    if step.strategy is None:
        return _in_words(step, src)
    found = open_strategy("steps.transform.strategy", step.strategy)
    assert found is not None
    try:
        to = followed(of_whole(found, whole_specs(src)), src)
        match(src, to)
    except ValueError as error:
        raise ValueError(f"{step.strategy}: {error}") from error
    return to


def run(step: Transform, src: Path, dst: Path, key: str | None = None, trust: Trust = ANYONE) -> Report:
    """``src`` is a checkpoint, or what ``import`` reads; ``dst`` is complete on return or not there.

    ``key`` is that of a checkpoint that is written; rank files are not encrypted.
    """
    if step.format != "launcher":
        form = RankFormat(step.format, step.prefix or PREFIX)
        how = _to(step, src)
        return to_rank_files(
            src, dst, how, form, step.src_strategy, overwrite=step.overwrite, workers=step.workers, trust=trust
        )
    if is_foreign(src, step.src_strategy):
        how = _to(step, src)
        return to_checkpoint(src, dst, how, step.src_strategy, overwrite=step.overwrite, key=key, workers=step.workers)
    to = target(step, _ours(step, src, trust))
    return transform(src, dst, to, overwrite=step.overwrite, key=key, workers=step.workers, trust=trust)


def check_place(step: Transform, dst: Path) -> None:
    """Raises as ``run`` does for a destination that is named beside its source. Writes nothing."""
    check = check_places if step.format == "launcher" else check_rank_places
    check(Path(str(step.src)), dst, step.overwrite)


def check_free(step: Transform, dst: Path) -> None:
    """The same without knowing the source."""
    if step.format == "launcher":
        check_destination(dst, step.overwrite, is_checkpoint, "checkpoint")
    else:
        check_free_for_ranks(dst, step.overwrite)


def check_source(step: Transform, src: Path, trust: Trust) -> None:
    """Raises for a source that is neither a checkpoint nor what ``import`` reads."""
    if not is_foreign(src, step.src_strategy):
        _ours(step, src, trust)


def check(step: Transform, src: Path, trust: Trust) -> None:
    """Raises as ``run`` does for what the heads of the files in ``src`` tell. Writes nothing."""
    if step.format != "launcher":
        writer(src, _to(step, src), step.src_strategy, trust=trust, verify=False)
    elif is_foreign(src, step.src_strategy):
        aimed(src, _to(step, src), step.src_strategy, verify=False)
    else:
        checkpoint = open_checkpoint(src, trust)
        target(step, checkpoint.strategy)
        Reader(checkpoint).check_headers()


def preview(step: Transform, src: Path, trust: Trust) -> str:
    """What ``run`` would read and write; nothing is written. Raises as it does."""
    if step.format == "launcher" and not is_foreign(src, step.src_strategy):
        to = target(step, _ours(step, src, trust))
        plan = plan_transform(src, to, workers=step.workers, trust=trust)
        return f"{plan.text()}{plan.detail()}".removesuffix("\n")
    check(step, src, trust)
    after = writer(src, _to(step, src), step.src_strategy, trust=trust, verify=False).after
    size = bytes_text(sum(e.spec.nbytes for e in after.entries.values()))
    what = "a checkpoint" if step.format == "launcher" else f".{step.format} files"
    return f"{src}: {many(len(after.entries), 'tensor')}, {size} -> {what} of {many(after.grid.size, 'rank')}"


def _ours(step: Transform, src: Path, trust: Trust) -> Strategy:
    strategy = open_checkpoint(src, trust).strategy
    if step.src_strategy is not None:
        raise ValueError(f"{src}: a checkpoint of ours, which says how it is laid out; leave src_strategy out")
    return strategy


def _to(step: Transform, src: Path) -> StrategyInput | Layouts:
    """MindSpore's file as it is: of one stage or of all is for the source to say. All else is worked out from it."""
    found = open_strategy("strategy", step.strategy)
    if found is None or not is_foreign(src, step.src_strategy):
        return lambda strategy: target(step, strategy)
    return found


def _in_words(step: Transform, src: Strategy) -> Strategy:
    return target_strategy(src, nproc=step.nproc, stages=step.stages, shard_size=step.shard_size, tp=step.tp)
