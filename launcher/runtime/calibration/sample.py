"""One thing to be timed, and how ranks time it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from launcher.plan.prediction.calibration.timed import Round, Taken, Timed

LEAST = 0.01
"""Seconds that one goes on at least: clocks and wake-ups are less than that."""
MOST = 2000


@dataclass(frozen=True)
class Sample:
    """``work`` is done ``times`` times by the ranks that are ``in_it``; ``joint``: they wait for each other.

    ``share``: of its seconds that counts, where it does more than what is named.
    """

    what: Timed
    work: Callable[[], object]
    in_it: bool = True
    joint: bool = False
    share: float = 1.0
    least: float = LEAST
    times: int = 1


def prepared(sample: Sample, device: torch.device) -> Sample:
    """Warmed up, and with as many ``times`` as are needed; all ranks call it."""
    seconds(sample, device)
    took = torch.tensor(seconds(sample, device), dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return replace(sample, times=min(MOST, max(1, math.ceil(sample.least / max(took.item(), 1e-9)))))


def seconds(sample: Sample, device: torch.device) -> float:
    """Of one time, as this rank sees it; 0 on those that are not in it. All ranks call it."""
    return _timed(sample, device)[0] / sample.times * sample.share


def _timed(sample: Sample, device: torch.device) -> tuple[float, float]:
    """Seconds of all times, and how many of them this thread had a core."""
    dist.barrier()
    if not sample.in_it:
        return 0.0, 0.0
    _finish(device)
    began, ran = time.perf_counter(), time.thread_time()
    for _ in range(sample.times):
        sample.work()
    _finish(device)
    return time.perf_counter() - began, time.thread_time() - ran


def _finish(device: torch.device) -> None:
    """What was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_round(samples: list[Sample], device: torch.device) -> Round:
    """Each sample once, on every rank, and how long the slowest took: in a step the others wait for it."""
    rows = [(s, *_timed(s, device)) for s in samples]
    found = torch.tensor([t / s.times * s.share for s, t, _ in rows], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)

    # who works by itself waits for nobody: what it was without a core others had
    own = torch.tensor([[t, ran] for s, t, ran in rows if not s.joint], dtype=torch.float64).sum(0)
    dist.all_reduce(own)
    taken = 1 - (own[1] / own[0]).item() if device.type == "cpu" else 0.0
    return {**dict(zip((s.what for s in samples), found.tolist(), strict=True)), Taken(): taken}
