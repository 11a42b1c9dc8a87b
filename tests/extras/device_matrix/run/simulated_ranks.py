"""The ranks of a stage in one process: their parts of tensors, their results, and collectives between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from launcher.extras.device_matrix.layout import TensorLayout

T = TypeVar("T")


@dataclass
class Threads:
    """Ranks that are threads and wait for each other at a barrier."""

    ranks: int
    boxes: list[Tensor] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.boxes = [torch.empty(0)] * self.ranks
        self.barrier = threading.Barrier(self.ranks, timeout=60)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Return ``work(rank)`` of each rank; an exception in one ends all."""

        def guarded(rank: int) -> T:
            try:
                return work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.ranks) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.ranks)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [f.result() for f in futures]

    def exchanged(self, rank: int, x: Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> list[Tensor]:
        """Return the tensors of the ranks that differ from ``rank`` only along ``axes``, in their order."""
        self.boxes[rank] = x
        self.barrier.wait()
        at = TensorLayout(matrix, ()).coords
        others = [a for a in range(len(matrix)) if a not in axes]
        peers = [r for r in range(self.ranks) if all(at(r)[a] == at(rank)[a] for a in others)]
        found = [self.boxes[r].clone() for r in peers]
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class Thread:
    """The collectives of one thread."""

    threads: Threads
    rank: int

    def sum(self, x: Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
        return torch.stack(self.threads.exchanged(self.rank, x, matrix, axes)).sum(0)

    def max(self, x: Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
        return torch.stack(self.threads.exchanged(self.rank, x, matrix, axes)).amax(0)


def part(x: Tensor, layout: TensorLayout, rank: int) -> Tensor:
    """Return a copy of the part of a full tensor that ``rank`` holds."""
    box = layout.box(tuple(x.shape), rank)
    return x[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))].clone()


def assembled(parts: Sequence[Tensor], layout: TensorLayout, shape: tuple[int, ...]) -> list[Tensor]:
    """Return the full tensor, with terms summed, from each set of ranks that together hold it once."""
    wholes: dict[tuple[int, ...], Tensor] = {}
    for rank, x in enumerate(parts):
        assert tuple(x.shape) == layout.local_shape(shape)
        at = layout.coords(rank)
        copy = tuple(at[a] for a in layout.repeated)
        if copy not in wholes:
            wholes[copy] = torch.zeros(shape, dtype=x.dtype)
        box = layout.box(shape, rank)
        here = wholes[copy][tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))]
        if layout.partial:
            here += x
        else:
            here.copy_(x)
    return list(wholes.values())
