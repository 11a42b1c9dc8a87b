"""What a step needs to know of a whole tensor that ranks have pieces of: sums over it, or all of it."""

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
    """A tensor laid out as ``layout``, of which ``rank`` has a piece.

    ``groups``: for each axis that cuts it, the ranks that differ from this one along that axis only.
    """

    layout: Layout
    rank: int
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict, hash=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return self.layout.shape

    def axes(self, dims: Iterable[int] | None = None) -> tuple[str, ...]:
        """Those that cut any of ``dims``, which may count from the end; of all without."""
        split = self.layout.split
        return tuple(axis for d in (range(len(split)) if dims is None else dims) for axis in split[d])

    def whole(self, piece: Tensor) -> Tensor:
        """All of a tensor laid out like this, ``piece`` of which is this rank's; every rank calls this."""
        axes = self.axes()
        if not axes:
            return piece

        # each rank's numbers in as much room as the largest piece takes, axis after axis
        boxes = self._boxes(axes)
        room = max(_numbers(box) for box in boxes)
        flat = piece.new_zeros(room)
        flat[: piece.numel()] = piece.reshape(-1)
        for axis in axes:
            found = flat.new_empty(flat.numel() * self.layout.grid[axis])
            dist.all_gather([*found.chunk(self.layout.grid[axis])], flat, group=self.groups[axis])
            flat = found

        # and where it belongs
        out = piece.new_empty(self.shape)
        for numbers, box in zip(flat.split(room) if room else (), boxes, strict=True):
            _at(out, box).copy_(numbers[: _numbers(box)].view(box.shape))
        return out

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's piece; shares memory."""
        box = self.layout.box(self.rank)
        assert box is not None, f"rank {self.rank} has nothing of {self.layout}"
        return _at(whole, box)

    def _boxes(self, axes: Sequence[str]) -> list[Box]:
        """In the order in which gathering over ``axes`` finds them: the last one is outermost."""
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
    """Of each parameter of ``rank``; ``groups``: of every axis, the ranks that differ along it only."""
    return {p: Pieces(layout, rank, groups) for p, layout in layouts.items()}


def alone(t: Tensor) -> Pieces:
    """Of a tensor that is whole on its rank."""
    shape = tuple(t.shape)
    return Pieces(Layout(Grid(()), shape, ((),) * len(shape)), 0)


@torch.no_grad()
def add_up(terms: Iterable[tuple[Pieces, Iterable[int] | None, Tensor]]) -> None:
    """Adds to each tensor what other ranks have of it, in place.

    A term is a sum over this rank's piece, along ``dims`` (all of them: ``None``). What goes over the same
    axes travels together. Every rank with a piece calls this with as many terms, in one order.
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
