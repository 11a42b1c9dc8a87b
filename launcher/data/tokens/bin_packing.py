"""Packs documents into windows by best fit decreasing, and indexes the windows of a file."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from launcher.data.shuffle import permutation
from launcher.data.tokens.formats import mapped
from launcher.data.tokens.token_file import TokenFile

Numbers = NDArray[np.int64]


def best_fit(lengths: Numbers, capacity: int) -> Numbers:
    """Returns the bin of each piece by best-fit decreasing (arXiv 2404.10830).

    ``lengths`` are from 1 to ``capacity``.

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
    """The bins by their free space. Pieces of equal length are placed together, as many as possible."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.opened = capacity, 0
        self.rooms: list[int] = []
        self.bins: dict[int, Numbers] = {}

    def tightest(self, length: int, count: int) -> Numbers:
        """Places a piece of ``length`` in each of up to ``count`` fullest bins with room; returns them."""
        at = bisect_left(self.rooms, length)
        if at == len(self.rooms):
            new = -(-count // (self.capacity // length))  # ceil: enough for all pieces
            self._put(self.capacity, np.arange(self.opened, self.opened + new))
            self.opened += new
        room = self.rooms[at]
        taken, rest = self.bins[room][:count], self.bins[room][count:]
        del self.bins[room], self.rooms[at]
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
            insort(self.rooms, room)


CHUNK = 1 << 24
"""The number of tokens that are scanned at once."""
BLOCK = 1 << 20
"""The number of pieces that are packed at once. More would hardly save space but would take more memory."""
FILES = 4096  # the most files whose index is cached; ranks that are forked share the planning process's cache
Packing = Literal["best_fit", "single"]


@dataclass(frozen=True, eq=False)
class DocumentIndex:
    """Window ``w`` has pieces ``[first[w], first[w + 1])``; piece ``p`` has tokens ``[start[p], stop[p])``.

    A piece is a document, or up to ``seq_len`` tokens of a longer one.
    """

    start: Numbers
    stop: Numbers
    first: Numbers

    def __len__(self) -> int:
        return len(self.first) - 1

    def window(self, number: int) -> list[tuple[int, int]]:
        """Returns the start and stop of each piece of a window."""
        mine = slice(self.first[number], self.first[number + 1])
        return [*zip(self.start[mine].tolist(), self.stop[mine].tolist(), strict=True)]


@lru_cache(maxsize=FILES)
def document_index(file: TokenFile, seq_len: int, packing: Packing) -> DocumentIndex:
    """Reads the file once. The index takes at most 24 bytes per piece; every process computes the same."""
    starts, stops, sizes = [], [], []
    for block, (start, stop) in enumerate(_blocks(_pieces(file, seq_len))):
        count = np.ones(len(start), np.int64)
        if packing == "best_fit":
            order, count = packed(stop - start, seq_len, block)
            start, stop = start[order], stop[order]
        starts.append(start)
        stops.append(stop)
        sizes.append(count)
    if not starts:
        empty = np.zeros(0, np.int64)
        return DocumentIndex(empty, empty, np.zeros(1, np.int64))
    first = np.concatenate(([0], np.cumsum(np.concatenate(sizes))))
    return DocumentIndex(np.concatenate(starts), np.concatenate(stops), first)


def packed(lengths: Numbers, seq_len: int, block: int) -> tuple[Numbers, Numbers]:
    """Packs pieces; returns their order by window, and the number of pieces of each window.

    Windows are shuffled, independently of the job's seed: the last windows are for validation and must be
    like the others.
    """
    bins = best_fit(lengths, seq_len)
    places = permutation(0, block, int(bins.max()) + 1)[bins]
    order = np.argsort(places, kind="stable").astype(np.int64)
    return order, np.bincount(places).astype(np.int64)


def _blocks(pieces: Iterator[tuple[Numbers, Numbers]]) -> Iterator[tuple[Numbers, Numbers]]:
    """Regroups the pieces into blocks of ``BLOCK`` pieces."""
    start, stop = np.zeros((2, 0), np.int64)
    for more_start, more_stop in pieces:
        start, stop = np.concatenate((start, more_start)), np.concatenate((stop, more_stop))
        while len(start) >= BLOCK:
            yield start[:BLOCK], stop[:BLOCK]
            start, stop = start[BLOCK:], stop[BLOCK:]
    if len(start):
        yield start, stop


def _pieces(file: TokenFile, seq_len: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Yields starts and stops of pieces, in order. A single last token has no target and is left out."""
    for start, stop in _documents(file):
        count = -(-(stop - start) // seq_len)  # ceil
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        at, end = np.repeat(start, count) + number * seq_len, np.repeat(stop, count)
        until = np.minimum(at + seq_len, end)
        predicted = (until < end) | (until - at > 1)
        yield at[predicted], until[predicted]


def _documents(file: TokenFile) -> Iterator[tuple[Numbers, Numbers]]:
    """Yields the starts and stops of documents, end token included, for one chunk of the file at a time."""
    tokens, begun = mapped(file), 0
    for at in range(0, file.tokens, CHUNK):
        stop = np.flatnonzero(tokens[at : at + CHUNK] == file.end_of_document) + at + 1
        if len(stop):
            yield np.concatenate(([begun], stop[:-1])), stop
            begun = int(stop[-1])
    if begun < file.tokens:  # the last document has no end token
        yield np.array([begun]), np.array([file.tokens])
