"""What each rank's own work takes in a step: what it does while it waits for no other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from launcher.runtime.torch_private import waits


class RankTimes:
    """Of this rank, and of all ranks as it hears of them in a collective that there is anyway.

    In a synchronous step all ranks take the same time by the clock: the one that is slow is the one that
    waits least. A step is measured from its start until its gradients are there.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._began: float | None = None
        self._seconds = 0.0
        self._steps = 0
        waits.seconds()

    def begin(self) -> None:
        """A step does."""
        self._began = time.perf_counter() - waits.seconds()

    def arrived(self) -> None:
        """Its gradients are there."""
        if self._began is not None:
            self._seconds += time.perf_counter() - waits.seconds() - self._began
            self._steps += 1
            self._began = None

    def share(self) -> torch.Tensor:
        """Milliseconds a step since the last call, (ranks,) float64: its own in its place, elsewhere 0.

        The sum over all ranks has those of each.
        """
        out = torch.zeros(self._size, dtype=torch.float64)
        if self._steps:
            out[self._rank] = 1e3 * self._seconds / self._steps
        self._seconds, self._steps = 0.0, 0
        return out


def figures(each: Sequence[float]) -> dict[str, float]:
    """Of the milliseconds of each rank.

    >>> figures([30.0, 90.0, 31.0])
    {'step_ms_median': 31.0, 'step_ms_worst': 90.0, 'worst_rank': 1}
    """
    worst = max(range(len(each)), key=each.__getitem__)
    return {"step_ms_median": median(each), "step_ms_worst": each[worst], "worst_rank": worst}
