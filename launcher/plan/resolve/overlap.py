"""Which collectives overlap with computation, and which ones a rank waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from launcher.job.schema.job import Job
from launcher.plan.communication.buckets_and_gathers import Bucket, Communication, GatherGroup
from launcher.plan.sizes import Sizes
from launcher.plan.tensor_parallel.input_gradients import EVERY
from launcher.plan.values.setting import Outcome, Status
from launcher.plan.values.text import many

AT_THE_END = "gradients are reduced after the last backward of a step"
AT_USE = "each group of weights is gathered once a step, before its first use"


def reducing(job: Job, sizes: Sizes, fused: Communication | None) -> Outcome:
    """Returns whether reductions of gradients overlap with the backward, and why."""
    if sizes.replicas == 1:
        return "satisfied", "one data-parallel rank: no gradient is sent"

    hsdp = job.parallel.hsdp
    sharded = fused is None or any(len(g.idle) < len(g.names) for g in fused.groups)
    if hsdp is None or sizes.grid["dp_shard"] == 1 or not sharded:
        return "degraded", AT_THE_END

    # with level1 the launcher itself reduces, once per step
    status: Status = "satisfied"
    text = "FSDP2 reduces each group while backward runs the next"
    if hsdp.optimizer_level == "level1":
        if fused is not None and fused.late:
            return "degraded", "gradients are reduced after the last weight-gradient action of their stage"
        if fused is not None and _ones(sizes, fused.scatters):
            return "degraded", "each rank has one bucket, which is full when its backward is over"
        status, text = "applied", "each bucket of a stage is sent while its last backward runs"
    elif fused is not None and fused.late:
        return "degraded", "a stage's gradients are reduced together, after each weight-gradient action"
    elif job.launch.device in ("cpu", "auto"):
        return _beside(job, "FSDP2 reduces each group during backward")

    if fused is not None and fused.unsharded:
        unsharded = many(fused.unsharded, "unsharded parameter")
        return "degraded", f"{text}, but {unsharded} only after the last backward of a step"
    return status, text


def gathering(job: Job, sizes: Sizes, fused: Communication | None) -> Outcome:
    """Returns whether the gathering of weights overlaps with computation, and why."""
    if sizes.grid["dp_shard"] == 1 or (fused is not None and not fused.groups):
        return "satisfied", "no weight is sharded: nothing is gathered"
    assert job.parallel.hsdp is not None
    if job.parallel.hsdp.optimizer_level != "level3":
        if fused is not None and _ones(sizes, fused.groups):
            return "degraded", "each rank has one group, gathered once a step before it computes"
        why = "weights are gathered once a step, ahead of use, and waited for where a group is used first"
        return "applied", why
    if job.launch.device in ("cpu", "auto"):
        return _beside(job, "FSDP2 gathers the next group during this one's computation")
    if fused is not None and all(n == 1 for n in Counter(g.stage for g in fused.groups).values()):
        return "degraded", "each stage is one group, which is gathered before it computes"
    return "satisfied", "FSDP2 gathers the next group while this one computes"


def _ones(sizes: Sizes, together: Iterable[GatherGroup | Bucket]) -> bool:
    """Returns true if each rank has at most one of ``together``."""
    return all(n == 1 for n in Counter(sizes.places[t.stage] for t in together).values())


def _beside(job: Job, text: str) -> Outcome:
    if job.launch.device == "cpu":
        return "degraded", f"{text} on accelerators only; the CPU waits"
    return "degraded", f"{text} where launch.device=auto finds an accelerator; on CPUs ranks wait"


def matmul(sizes: Sizes, fused: Communication | None, ops: Collection[str]) -> Outcome:
    """Returns whether ``ops`` send input gradients while weight gradients are computed, and why."""
    if sizes.grid["tp"] == 1:
        return "satisfied", "no operator is cut over tp, so this plan has no such collective"
    if fused is None:
        return "applied", "input gradients of matmuls are sent while weight gradients are computed"

    # nothing to send, or not by these collectives
    input_gradients = fused.input_gradients(ops)
    if not any(c.phase == "backward" for s in fused.spreads for c in s.comms):
        return "satisfied", "no operator that is cut sends anything in backward"
    if not input_gradients:
        by = "" if ops == EVERY else f" by {_listed(ops)}"
        return "satisfied", f"no trained matmul sends the gradient of its input{by}"

    # all matmuls overlap, or some of them
    if input_gradients.late:
        first = f"input gradients of {many(len(input_gradients.late), 'matmul')} are waited for"
        return "degraded", f"{first}: weight gradients are computed in the second half of a backward"
    text = (
        f"input gradients of {many(len(input_gradients.beside), 'matmul')} "
        "are sent while weight gradients are computed"
    )
    if not input_gradients.compiled:
        return "applied", text
    waits = f"of {many(len(input_gradients.compiled), 'matmul')} that torch compiles are waited for"
    return "degraded", f"{text}; those {waits}" if input_gradients.beside else f"input gradients {waits}"


def _listed(ops: Collection[str]) -> str:
    return " or ".join(op.replace("_", "-") for op in sorted(ops))


def lines(
    job: Job, sizes: Sizes, fused: Communication, *, gathers: bool, reduces: bool, ops: Collection[str]
) -> Iterator[str]:
    """Yields a line for each kind of collective that this plan has.

    ``gathers``, ``reduces`` and ``ops`` are the overlaps that are requested.
    """
    hsdp = job.parallel.hsdp
    level = "" if hsdp is None else hsdp.optimizer_level

    # over data-parallel ranks
    if sizes.grid["dp_shard"] > 1 and fused.groups:
        yield gathering(job, sizes, fused)[1] if gathers or level == "level3" else AT_USE
    if sizes.replicas > 1 and (fused.buckets or any(len(g.idle) < len(g.names) for g in fused.groups)):
        yield reducing(job, sizes, fused)[1] if reduces or level != "level1" else AT_THE_END

    # over tp
    beside = fused.input_gradients(ops)
    others = len(fused.input_gradients(EVERY)) - len(beside)
    if beside:
        yield matmul(sizes, fused, ops)[1]
    if others:
        yield f"input gradients of {many(others, 'matmul')} over tp are waited for"
