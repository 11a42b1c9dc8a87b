"""How long each rank's own work takes in a step, without the time in which it waits for others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from launcher.runtime.torch_private import waits


class RankTimes:
    """Times the work of this rank; all ranks exchange their times in a collective that runs anyway.

    In a synchronous step all ranks take the same wall-clock time: the slow one is the one that waits least. A
    step is measured from its start until its gradients have arrived.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._began: float | None = None
        self._seconds = 0.0
        self._steps = 0
        waits.seconds()

    def begin(self) -> None:
        """Marks the start of a step."""
        self._began = time.perf_counter() - waits.seconds()

    def arrived(self) -> None:
        """Marks the arrival of the step's gradients."""
        if self._began is not None:
            self._seconds += time.perf_counter() - waits.seconds() - self._began
            self._steps += 1
            self._began = None

    def share(self) -> torch.Tensor:
        """Milliseconds per step since the last call, (ranks,) float64: this rank's at its index, elsewhere 0.

        The sum over all ranks contains the times of each.
        """
        out = torch.zeros(self._size, dtype=torch.float64)
        if self._steps:
            out[self._rank] = 1e3 * self._seconds / self._steps
        self._seconds, self._steps = 0.0, 0
        return out


def figures(each: Sequence[float]) -> dict[str, float]:
    """The median and the worst of the ranks' milliseconds.

    >>> figures([30.0, 90.0, 31.0])
    {'step_ms_median': 31.0, 'step_ms_worst': 90.0, 'worst_rank': 1}
    """
    worst = max(range(len(each)), key=each.__getitem__)
    return {"step_ms_median": median(each), "step_ms_worst": each[worst], "worst_rank": worst}
