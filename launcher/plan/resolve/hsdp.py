"""``parallel.hsdp``: over how many ranks weights are sharded, and when they are gathered and reduced."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Hsdp
from launcher.plan.communication.buckets_and_gathers import Communication
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.schedule.schedules import Rule
from launcher.plan.sizes import Sizes
from launcher.plan.values.note import Note
from launcher.plan.values.setting import Setting
from launcher.plan.values.text import bytes_text, many, some

KEY = "parallel.hsdp"
LEVEL = f"{KEY}.optimizer_level"
SHARDS, AXIS = f"{KEY}.shard_size", "parallel.grid.dp_shard"

LEVELS = {
    "level1": "weights and optimizer state are sharded; gradients are reduced once a step",
    "level2": "gradients are sharded too and reduced after every micro batch",
    "level3": "weights are also dropped after the forward and gathered again for the backward",
}

DROPPED = (
    "drops the weights after each forward and backward, and {} computes weight gradients after "
    "that: FSDP2 would silently lose these gradients"
)


def shards(job: Job, problems: list[Problem]) -> int | None:
    """Returns the number of ranks that share one copy of the weights.

    ``None`` means all data-parallel ranks.
    """
    hsdp, requested = job.parallel.hsdp, job.parallel.grid.dp_shard
    if hsdp is None:
        if requested not in (None, 1):
            problems.append(Problem(AXIS, f"{requested}: sharding needs {KEY}", quote(f"{KEY}={{}}")))
        return 1
    if hsdp.shard_size > 0 and requested not in (None, hsdp.shard_size):
        text = f"{requested}: contradicts {SHARDS}={hsdp.shard_size}"
        problems.append(Problem(AXIS, text, f"{AXIS}={hsdp.shard_size}"))
    return hsdp.shard_size if hsdp.shard_size > 0 else requested


def shard_size_notes(job: Job, shard: int) -> list[Note]:
    """Returns a note on the size that ``shard_size: -1`` resolves to."""
    hsdp = job.parallel.hsdp
    if hsdp is None or hsdp.shard_size != -1:
        return []
    why = AXIS if job.parallel.grid.dp_shard else "the data-parallel group"
    return [Note(SHARDS, f"-1 -> {shard}: {why}")]


def indivisible(job: Job, world: int, dp: int, shard: int) -> Problem:
    """Returns the problem of ``dp`` data-parallel ranks that groups of ``shard`` ranks do not divide."""
    hsdp = job.parallel.hsdp
    key = SHARDS if hsdp and hsdp.shard_size > 0 else AXIS
    fits = [n for n in range(1, dp + 1) if dp % n == 0]
    text = f"{shard}: does not divide the {many(dp, 'data-parallel rank')} ({world} ranks / {world // dp})"
    text += f"; use one of {', '.join(map(str, fits))}"
    if dp == 1:
        text = f"{shard}: there is only 1 data-parallel rank ({world} ranks / {world}); use 1"
    return Problem(key, text, f"{key}={max(n for n in fits if n <= shard)}")


def dropped(job: Job, sizes: Sizes | None, rule: Rule) -> Iterator[Problem]:
    """Yields a problem if the scheduler of ``rule`` computes weight gradients after weights were dropped."""
    hsdp = job.parallel.hsdp
    if not rule.split or hsdp is None or hsdp.optimizer_level != "level3":
        return
    if sizes is None or sizes.grid["dp_shard"] > 1:
        yield Problem(LEVEL, f"level3: {DROPPED.format(job.parallel.pipeline.scheduler)}", f"{LEVEL}=level2")


def rows(job: Job, sizes: Sizes, fused: Communication | None) -> Iterator[Setting]:
    """Yields the setting of the optimizer level."""
    hsdp = job.parallel.hsdp
    if hsdp is None or sizes.engine.over_matrices:  # how each parameter is sharded is not known yet
        return
    level = hsdp.optimizer_level
    if sizes.grid["dp_shard"] == 1:
        yield Setting(LEVEL, level, "satisfied", "the shard axis has one rank, so nothing is sharded")
    elif fused is not None and not fused.groups:
        yield Setting(LEVEL, level, "degraded", _why_not_sharded(hsdp, fused))
    else:
        often = "every piece of a micro batch" if sizes.pieces > 1 else "every micro batch"
        yield Setting(LEVEL, level, "applied", LEVELS[level].replace("every micro batch", often))


def _why_not_sharded(hsdp: Hsdp, fused: Communication) -> str:
    largest = max((p.spec.nbytes for p in fused.params if not p.buffer), default=0)
    if largest < hsdp.threshold * 1024:
        why = f"the largest has {bytes_text(largest)}, {KEY}.threshold is {hsdp.threshold} KB"
    else:
        why = "none of them can be cut over the ranks that share the weights"
    return f"no parameter is sharded: {why}; every rank keeps all of them"


def notes(job: Job, sizes: Sizes, params: tuple[Placed, ...]) -> Iterator[Note]:
    """Yields notes on parameters that are not sharded, and on those that are cut unevenly."""
    hsdp, n = job.parallel.hsdp, sizes.grid["dp_shard"]
    if hsdp is None or sizes.engine.over_matrices:
        return
    if n == 1:
        yield Note(KEY, "has no effect: the shard axis has one rank")
        return

    small = sum(not p.sharded and p.trainable and p.spec.nbytes < hsdp.threshold * 1024 for p in params)
    if small:
        verb = "stays" if small == 1 else "stay"
        how = "together" if job.parallel.comm_fusion.openstate else "one by one"
        text = f"{hsdp.threshold} KB: {many(small, 'smaller parameter')} {verb} unsharded"
        reduced = "its gradient is all-reduced" if small == 1 else f"gradients are all-reduced {how}"
        yield Note(f"{KEY}.threshold", f"{text}; {reduced}")

    ragged = [p for p in params if p.spec.shape and p.spec.shape[0] % n]
    cut = [p.name for p in ragged if p.sharded]
    if cut:
        text = f"{some(cut)}: dim 0 is not a multiple of {n}, so the last ranks hold less or nothing"
        yield Note(f"{KEY}.uneven", f"pad: {text}")
    full = [p.name for p in ragged if hsdp.uneven == "whole" and p.trainable]
    if full:
        verb = "stays" if len(full) == 1 else "stay"
        yield Note(
            f"{KEY}.uneven", f"whole: {some(full)} {verb} unsharded, because dim 0 is not a multiple of {n}"
        )
