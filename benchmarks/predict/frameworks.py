"""Turns a cluster of ``conf/cluster`` into that of each framework, by at most five fitted constants.

nanotron has more: two for its runs of one stage on many devices, and those for its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.predict.rows import Row
from launcher.extras.calibration.refit import changed
from launcher.job.schema.cluster import Cluster
from launcher.plan.memory.rank_memory import Memory
from launcher.plan.time.step_work import RankWork, StepWork

SET_BY_HAND: dict[str, dict[str, float]] = {
    "megatron": {"kernels.launch_us": 8.0},
    "megatron_deepspeed": {"links.inside.latency_us": 0.5},
    "nanotron": {
        "memory_gb": 80e9 / (1 << 30), "kernels.attention": 0.6, "kernels.moved": 0.35,
        "overheads.exposed": 1.0, "overheads.near_limit": 3.0, "overheads.fragments": 0.1,
        "overheads.stall_ms": 430.0,
    },
    "torchtitan": {},
}  # fmt: skip
"""Constants set by hand: how far kernels are fused and gradient collectives hidden, what an allocator does
near its limit, and how long messages between stages wait on a cluster of 512 devices (Ultra-Scale Playbook).
"""

FITTED: dict[str, dict[str, float]] = {
    "megatron": {
        "efficiency": 0.717, "kernels.moved": 0.814, "overheads.exposed_tp": 0.268,
        "links.between.latency_us": 19.6,
    },
    "megatron_deepspeed": {
        "efficiency": 0.889, "kernels.moved": 0.513, "kernels.launch_us": 32.0, "overheads.slot_ms": 2.16,
        "links.between.gb_per_s": 11.5,
    },
    "nanotron": {
        "efficiency": 0.516, "kernels.launch_us": 40.7, "overheads.crossing_ms": 0.365,
        "links.between.latency_us": 57.1,
    },
    "torchtitan": {},
}  # fmt: skip
"""Constants that ``--fit FRAMEWORK`` fits, at most five; ``report.BLIND`` says on which models."""


def cluster_for(row: Row, cluster: Cluster) -> Cluster:
    """Return ``cluster`` with the constants of the framework of ``row``."""
    found = SET_BY_HAND[row.framework] | FITTED[row.framework]
    if _on_many(row):
        found |= {"overheads.step_ms": STEP_MS}
    if _waits(row):
        found |= {"overheads.slot_ms": WAIT_MS * row.tp * row.layers}
    return changed(cluster, found)


MANY, WIDE = 512, 16
"""A number of ranks and a size of tp. nanotron has runs of two kinds, and their share changes with both
numbers. Some runs keep the inputs that were gathered over tp; others gather them again, and their collectives
wait for the host. The tables do not say which kind a run is: a layout that was measured twice may have one
run of each.
"""
WAIT_MS = 1.2
"""Milliseconds that a layer waits in forward and in backward, for each rank of tp.

Fitted together with ``STEP_MS`` to the runs of one stage on ``MANY`` ranks. With several stages,
`overheads.crossing_ms` and `overheads.stall_ms` cover this time.
"""
STEP_MS = 500.0


def _on_many(row: Row) -> bool:
    """Return true for a run of nanotron with one stage on at least ``MANY`` devices."""
    return row.framework == "nanotron" and row.pp == 1 and row.ranks >= MANY


def _waits(row: Row) -> bool:
    return _on_many(row) and 1 < row.tp <= WIDE


GATHERED_KEPT = 0.6
"""The share of the inputs gathered over tp that nanotron keeps until the backward."""
KEPT, KEPT_OVER_TP = 1.05, 1.2
"""The bytes that nanotron's layers keep for the backward, relative to ours on CUDA: without and with tp."""
LOGITS = 3.5
"""Bytes per logit that nanotron's loss needs less than ours."""
WORK_SPACE = 200_000_000
"""Bytes of libraries that nanotron's allocator counts."""
BUFFERS = 1.5
"""The size of nanotron's buffers for fp32 gradients, relative to the weights in half precision."""


def with_framework_memory(
    row: Row, work: StepWork, memory: Sequence[Memory], in_flight: Sequence[int]
) -> StepWork:
    """Return ``work`` with the memory of the row's framework, where it differs from ours.

    ``memory``: for each pipeline rank, that of the rank that needs most. nanotron gathers inputs over tp
    again in the backward, where this engine keeps them, and sums gradients in fp32.
    """
    if row.framework != "nanotron":
        return work
    share = _gathered_kept(row)
    factor = KEPT if row.tp == 1 else KEPT_OVER_TP
    ranks = []
    for pp, (rank, held) in enumerate(zip(work.ranks, memory, strict=True)):
        sent = sum(n * nbytes for kind, nbytes, n in _sent(work, pp) if kind == "all_gather")
        gathered = sent * in_flight[pp]
        logits = row.micro * row.seq * row.vocab // row.tp if pp == row.pp - 1 else 0
        kept = held.activations - gathered - 2 * LOGITS * logits
        more = (factor - 1) * kept - (1 - share) * gathered - LOGITS * logits + BUFFERS * _weights(rank)
        ranks.append(replace(rank, memory=int(held.total + more) + WORK_SPACE))
    return replace(work, ranks=tuple(ranks))


def _gathered_kept(row: Row) -> float:
    """Return the share of the gathered inputs that a run keeps.

    With several stages, two of the micro batches in flight on the first stage keep none.
    """
    if row.pp == 1:
        return 0.0 if _waits(row) else GATHERED_KEPT
    keeps = row.tp <= WIDE and row.ranks < MANY
    return GATHERED_KEPT * max(0.0, 1 - 2 / min(row.pp, row.micros)) if keeps else 0.0


def _sent(work: StepWork, pp: int) -> list[tuple[str, int, int]]:
    """Return the collectives in the forwards of a pipeline rank."""
    return [sent for s, at in enumerate(work.places) if at == pp for sent in work.stages[s].forward.sent]


def _weights(rank: RankWork) -> int:
    """Return the bytes of gathered weights in half precision."""
    return sum(n * nbytes for kind, nbytes, n in rank.share if kind == "all_gather")
