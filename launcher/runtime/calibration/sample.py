"""One thing to be timed, and how ranks time it."""

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
"""Seconds that one goes on at least: clocks and wake-ups are less than that."""
MOST = 2000
ROOMY = 16 << 30
"""Bytes of a device on which samples have their full sizes: together they take half of it at most."""


def divisor(memory: int) -> int:
    """What the sides of samples are divided by on a device of so many bytes, a power of two.

    >>> [divisor(gb << 30) for gb in (80, 16, 15, 4, 3)]
    [1, 1, 2, 2, 4]
    """
    halvings = 0
    while memory << 2 * halvings < ROOMY:
        halvings += 1
    return 1 << halvings


@dataclass(frozen=True)
class Sample:
    """``work`` is done ``times`` times by the ranks that are ``in_it``; ``joint``: they wait for each other.

    ``before``: is done ahead of each time, and does not count. ``share``: of its seconds that counts, where
    it does more than what is named.
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
    """Warmed up, and with as many ``times`` as are needed; all ranks call it."""
    _timed(sample, device)
    dist.barrier()
    began = time.perf_counter()
    counted, _ = _timed(sample, device)
    whole = time.perf_counter() - began if sample.before is not None else counted
    took = torch.tensor(whole, dtype=torch.float64).nan_to_num(0.0)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return replace(sample, times=min(MOST, max(1, math.ceil(sample.least / max(took.item(), 1e-9)))))


def _timed(sample: Sample, device: torch.device) -> tuple[float, float]:
    """Seconds of all times, and how many of them this thread had a core; NaN on ranks that are not in it."""
    if not sample.in_it:
        return math.nan, math.nan
    if sample.before is not None:
        each = [_after(sample.before, sample.work, device) for _ in range(sample.times)]
        return sum(each), 0.0
    if not sample.joint:  # ranks that are in nothing may still be on their way out of the barrier
        sample.work()
    return _clocked(lambda: [sample.work() for _ in range(sample.times)], device)


def _after(before: Callable[[], object], work: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``work`` alone."""
    before()
    return _clocked(work, device)[0]


def _clocked(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    synchronize(device)
    began, ran = time.perf_counter(), time.thread_time()
    work()
    synchronize(device)
    return time.perf_counter() - began, time.thread_time() - ran


def one_round(samples: list[Sample], device: torch.device) -> Round:
    """Each sample once, on every rank, and what it adds to a step.

    That is how long the slowest takes, for whom the others wait. Of what comes after something else it is how
    long the rank takes that comes last: it waits for nobody.
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

    # who works by itself waits for nobody: what it was without a core others had
    alone = [row for s, row in zip(samples, rows, strict=True) if not s.joint]
    own = torch.tensor(alone, dtype=torch.float64).nansum(0)
    dist.all_reduce(own)
    taken = 1 - (own[1] / own[0]).item() if device.type == "cpu" else 0.0
    return {**dict(zip((s.what for s in samples), seconds, strict=True)), Taken(): taken}
