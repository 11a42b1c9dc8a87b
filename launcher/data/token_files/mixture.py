"""Selects the source of each sample by the sources' weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import lcm

import numpy as np
from numpy.typing import NDArray

PERIOD = 1 << 16
"""The maximum number of samples after which the order of sources repeats; weights are rounded to fit it."""

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """``counts[s]``: samples of source ``s`` in one period.

    Of any first ``n`` samples, ``n * counts[s] / sum(counts)`` are of source ``s``, rounded up or down.
    """

    counts: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float]) -> Mixture:
        """From weights, which need not add up to 1. The count of a weight that is relatively tiny is 0.

        >>> Mixture.of([0.7, 0.2, 0.1]).counts
        (7, 2, 1)
        """
        exact = [Fraction(str(w)) for w in weights]
        shares = [w / sum(exact) for w in exact]
        period = lcm(*(share.denominator for share in shares))
        if period <= PERIOD:
            return cls(tuple(int(share * period) for share in shares))

        # round to the nearest counts that add up; on ties the first source wins
        counts = [int(share * PERIOD) for share in shares]
        left = sorted(range(len(shares)), key=lambda s: (counts[s] - shares[s] * PERIOD, s))
        for s in left[: PERIOD - sum(counts)]:
            counts[s] += 1
        return cls(tuple(counts))

    def at(self, indices: Indices) -> tuple[Indices, Indices]:
        """The source of each sample, and how many samples of that source come before it."""
        sources, before = _period(self.counts)
        periods, places = np.divmod(indices, len(sources))
        chosen = sources[places]
        return chosen, periods * np.array(self.counts)[chosen] + before[places]

    def epoch(self, sizes: Sequence[int]) -> int:
        """The samples until all ``sizes[s]`` windows of every source have been read; small ones repeat.

        >>> Mixture((1, 1)).epoch([10, 3])
        19
        """
        return max((self._index(s, n - 1) + 1 for s, n in enumerate(sizes) if n), default=0)

    def _index(self, source: int, ordinal: int) -> int:
        """The index of the sample of ``source`` that ``ordinal`` samples of it precede."""
        periods, rest = divmod(ordinal, self.counts[source])
        places = np.flatnonzero(_period(self.counts)[0] == source)
        return periods * sum(self.counts) + int(places[rest])


@lru_cache(maxsize=8)
def _period(counts: tuple[int, ...]) -> tuple[Indices, Indices]:
    """The sources of one period, and how many samples of the same source precede each place.

    The ``k``-th sample of a source comes no earlier than its share, rounded up, allows and no later than its
    share, rounded down, requires; the earliest deadline comes first. This always works: it is a proportionate
    fair schedule (Baruah et al. 1996) on one processor.
    """
    period = sum(counts)
    later = [(0, s, 0) for s, n in enumerate(counts) if n]  # earliest place, source, number
    ready: list[tuple[int, int, int]] = []  # deadline (place), source, number
    sources, before = np.zeros((2, period), np.int64)
    for place in range(period):
        while later and later[0][0] <= place:
            _, s, k = heappop(later)
            heappush(ready, (-(-(k + 1) * period // counts[s]), s, k))
        _, s, k = heappop(ready)
        sources[place], before[place] = s, k
        heappush(later, ((k + 1) * period // counts[s], s, k + 1))
    return sources, before
