"""One piece of work to time, and how ranks time it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from launcher.plan.prediction.calibration.timed import Round, Taken, Timed
from launcher.runtime.device import synchronize

LEAST = 0.01
"""The least seconds of a timing, far more than the errors of clocks and wake-ups."""
MOST = 2000
ROOMY = 16 << 30
"""Device bytes from which on samples have their full sizes: together they use at most half of it."""


def divisor(memory: int) -> int:
    """The divisor of the sides of samples on a device with ``memory`` bytes: a power of two.

    >>> [divisor(gb << 30) for gb in (80, 16, 15, 4, 3)]
    [1, 1, 2, 2, 4]
    """
    halvings = 0
    while memory << 2 * halvings < ROOMY:
        halvings += 1
    return 1 << halvings


@dataclass(frozen=True)
class Sample:
    """Runs ``work`` ``times`` times on the ranks that are ``in_it``; ``joint``: they wait for each other.

    ``before`` runs untimed ahead of each repetition. ``share``: the share of the seconds that counts, if the
    work does more than ``what`` names.
    """

    what: Timed
    work: Callable[[], object]
    in_it: bool = True
    joint: bool = False
    before: Callable[[], object] | None = None
    share: float = 1.0
    least: float = LEAST
    times: int = 1


def prepared(sample: Sample, device: torch.device) -> Sample:
    """Warms up, and sets ``times`` so that the timing takes ``least`` seconds; all ranks call it."""
    _timed(sample, device)
    dist.barrier()
    began = time.perf_counter()
    counted, _ = _timed(sample, device)
    whole = time.perf_counter() - began if sample.before is not None else counted
    took = torch.tensor(whole, dtype=torch.float64).nan_to_num(0.0)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return replace(sample, times=min(MOST, max(1, math.ceil(sample.least / max(took.item(), 1e-9)))))


def _timed(sample: Sample, device: torch.device) -> tuple[float, float]:
    """Seconds of all repetitions, and this thread's CPU seconds in them; NaN on ranks that are not in it."""
    if not sample.in_it:
        return math.nan, math.nan
    if sample.before is not None:
        each = [_after(sample.before, sample.work, device) for _ in range(sample.times)]
        return sum(each), 0.0
    if not sample.joint:  # ranks without work may still be leaving the barrier
        sample.work()
    return _clocked(lambda: [sample.work() for _ in range(sample.times)], device)


def _after(before: Callable[[], object], work: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``work``, without ``before``."""
    before()
    return _clocked(work, device)[0]


def _clocked(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    synchronize(device)
    began, ran = time.perf_counter(), time.thread_time()
    work()
    synchronize(device)
    return time.perf_counter() - began, time.thread_time() - ran


def one_round(samples: list[Sample], device: torch.device) -> Round:
    """Times each sample once on every rank; returns the seconds that it adds to a step.

    That is the time of the slowest rank, for which the others wait. For a sample with ``before`` it is the
    time of the rank that arrives last, which is the fastest: it waits for no other.
    """
    rows = []
    for sample in samples:
        dist.barrier()
        rows.append(_timed(sample, device))
    each = zip(samples, rows, strict=True)
    found = torch.tensor([t / s.times * s.share for s, (t, _) in each], dtype=torch.float64)
    most, least = found.nan_to_num(-math.inf), found.nan_to_num(math.inf)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    after = torch.tensor([s.before is not None for s in samples])
    seconds = torch.where(after, least, most).tolist()

    # work that is not joint waits for no rank: when it had no core, other processes had it
    alone = [row for s, row in zip(samples, rows, strict=True) if not s.joint]
    own = torch.tensor(alone, dtype=torch.float64).nansum(0)
    dist.all_reduce(own)
    taken = 1 - (own[1] / own[0]).item() if device.type == "cpu" else 0.0
    return {**dict(zip((s.what for s in samples), seconds, strict=True)), Taken(): taken}
