"""Best-fit decreasing bin packing: the longest pieces first, each into the fullest bin that has room."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def best_fit(lengths: Numbers, capacity: int) -> Numbers:
    """The bin of each piece by best-fit decreasing, as in arXiv 2404.10830; lengths are 1 to ``capacity``.

    >>> best_fit(np.array([3, 8, 5, 2, 2]), 8).tolist()
    [1, 0, 1, 2, 2]
    """
    bins, free = np.empty(len(lengths), np.int64), _Free(capacity)
    order = np.argsort(-lengths, kind="stable")
    changes = np.flatnonzero(np.diff(lengths[order])) + 1
    for pieces in np.split(order, changes) if len(order) else []:
        length = int(lengths[pieces[0]])
        while len(pieces):
            taken = free.tightest(length, len(pieces))
            bins[pieces[: len(taken)]] = taken
            pieces = pieces[len(taken) :]
    return bins


class _Free:
    """Bins by their free space; equal pieces are placed as many at once as possible."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.opened = capacity, 0
        self.left: list[int] = []
        self.bins: dict[int, Numbers] = {}

    def tightest(self, length: int, count: int) -> Numbers:
        """Up to ``count`` of the fullest bins with room for a piece of ``length``; places one in each."""
        at = bisect_left(self.left, length)
        if at == len(self.left):
            new = -(-count // (self.capacity // length))  # ceil: enough for all pieces
            self._put(self.capacity, np.arange(self.opened, self.opened + new))
            self.opened += new
        room = self.left[at]
        taken, rest = self.bins[room][:count], self.bins[room][count:]
        del self.bins[room], self.left[at]
        self._put(room, rest)
        self._put(room - length, taken)
        return taken

    def _put(self, room: int, bins: Numbers) -> None:
        if not room or not len(bins):
            return
        if room in self.bins:
            self.bins[room] = np.concatenate((self.bins[room], bins))
        else:
            self.bins[room] = bins
            insort(self.left, room)
