"""Sums over a full tensor of which ranks have pieces, and the gathered tensor, for optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, Layout


@dataclass(frozen=True)
class Pieces:
    """Describes the full tensor of ``layout``, of which ``rank`` has a piece.

    ``groups`` has, for each axis that splits it, the ranks that differ from this one along that axis only.
    """

    layout: Layout
    rank: int
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict, hash=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return self.layout.shape

    def axes(self, dims: Iterable[int] | None = None) -> tuple[str, ...]:
        """Return the axes that split any of ``dims`` (may count from the end), or any dim for ``None``."""
        split = self.layout.split
        return tuple(axis for d in (range(len(split)) if dims is None else dims) for axis in split[d])

    def whole(self, piece: Tensor) -> Tensor:
        """Gather the full tensor of which ``piece`` is this rank's piece; every rank calls this."""
        axes = self.axes()
        if not axes:
            return piece

        # pad each rank's values to the size of the largest piece, and gather them axis after axis
        boxes = self._boxes(axes)
        room = max(_numbers(box) for box in boxes)
        flat = piece.new_zeros(room)
        flat[: piece.numel()] = piece.reshape(-1)
        for axis in axes:
            found = flat.new_empty(flat.numel() * self.layout.grid[axis])
            dist.all_gather([*found.chunk(self.layout.grid[axis])], flat, group=self.groups[axis])
            flat = found

        # copy each piece to its place
        out = piece.new_empty(self.shape)
        for numbers, box in zip(flat.split(room) if room else (), boxes, strict=True):
            _at(out, box).copy_(numbers[: _numbers(box)].view(box.shape))
        return out

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's piece of ``whole``; it shares memory."""
        box = self.layout.box(self.rank)
        assert box is not None, f"rank {self.rank} has nothing of {self.layout}"
        return _at(whole, box)

    def _boxes(self, axes: Sequence[str]) -> list[Box]:
        """Return the boxes in the order that gathering over ``axes`` gives: the last axis is outermost."""
        grid, here = self.layout.grid, self.layout.grid.coords(self.rank)
        out = []
        for places in product(*(range(grid[axis]) for axis in reversed(axes))):
            rank = grid.rank(**here | dict(zip(reversed(axes), places, strict=True)))
            box = self.layout.box(rank)
            assert box is not None
            out.append(box)
        return out


def pieces_of(
    layouts: Mapping[nn.Parameter, Layout], rank: int, groups: Mapping[str, dist.ProcessGroup]
) -> dict[nn.Parameter, Pieces]:
    """Return the ``Pieces`` of each parameter of ``rank``.

    ``groups`` has, for every axis, the ranks that differ from this one along it only.
    """
    return {p: Pieces(layout, rank, groups) for p, layout in layouts.items()}


def alone(t: Tensor) -> Pieces:
    """Return the ``Pieces`` of a tensor that its rank has in full."""
    shape = tuple(t.shape)
    return Pieces(Layout(Grid(()), shape, ((),) * len(shape)), 0)


@torch.no_grad()
def add_up(terms: Iterable[tuple[Pieces, Iterable[int] | None, Tensor]]) -> None:
    """Sum each tensor over the ranks that split its dims, in place.

    A term is a sum over this rank's piece, along ``dims`` (``None`` for all). Terms over the same axes share
    a collective. Every rank with a piece calls this with as many terms, in the same order.
    """
    together: dict[tuple[tuple[str, ...], torch.dtype], list[Tensor]] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    for pieces, dims, t in terms:
        axes = pieces.axes(dims)
        if axes:
            together.setdefault((axes, t.dtype), []).append(t)
            groups.update((axis, pieces.groups[axis]) for axis in axes)

    for (axes, _), tensors in together.items():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        for axis in axes:
            dist.all_reduce(flat, group=groups[axis])
        for t, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(total.view(t.shape))


def _numbers(box: Box) -> int:
    return 0 if box.empty else torch.Size(box.shape).numel()


def _at(whole: Tensor, box: Box) -> Tensor:
    for dim, (lo, hi) in enumerate(zip(box.lo, box.hi, strict=True)):
        whole = whole.narrow(dim, lo, hi - lo)
    return whole
