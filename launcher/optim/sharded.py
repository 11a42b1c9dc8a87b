"""Optimizers that work on shards, or on full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher.parallel.local_tensors import cut, grad, local
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, Layout


class LocalShards(torch.optim.Optimizer):
    """Gives the optimizer ``inner`` this rank's pieces of the parameters; its update must be elementwise.

    A user-defined class then sees plain tensors, so it may use operations that DTensor has no rule for. The
    pieces share memory with the parameters; gradients are passed to them before a step.
    """

    def __init__(
        self, build: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], params: Sequence[nn.Parameter]
    ) -> None:
        """Builds ``inner``.

        The base class is not initialized, because groups, state and hooks are those of ``inner``.
        """
        self._own = {p: _piece(p) for p in params}
        self.inner = build(list(self._own.values()))
        self.register_step_pre_hook = self.inner.register_step_pre_hook  # type: ignore[method-assign]
        self.register_step_post_hook = self.inner.register_step_post_hook  # type: ignore[method-assign]

    def own(self, p: Tensor) -> Tensor:
        """Returns the piece of ``p``, or ``p`` itself if it is not trained."""
        return self._own.get(p, p)  # type: ignore[call-overload, no-any-return]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, piece in self._own.items():
            piece.grad = grad(p)
        with torch.no_grad():
            for shard, moved in self._moved():  # the weights may have been loaded since
                moved.copy_(shard)
        self.inner.step()
        with torch.no_grad():
            for shard, moved in self._moved():
                shard.copy_(moved)

    def _moved(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Yields the shard and the piece where the optimizer has replaced ``p.data``.

        The piece keeps its own memory, of which the optimizer may have views, as of one buffer for all.
        """
        for p, piece in self._own.items():
            shard = local(p.detach())
            if piece.data_ptr() != shard.data_ptr():
                yield shard, piece

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        for p in self._own:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()


def _piece(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(local(p.detach())) if isinstance(p, DTensor) else p


@dataclass(frozen=True)
class TensorPieces:
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
        """Returns the axes that split any of ``dims``, or any dim for ``None``; dims may be negative."""
        split = self.layout.split
        return tuple(axis for d in (range(len(split)) if dims is None else dims) for axis in split[d])

    def gather(self, piece: Tensor) -> Tensor:
        """Gathers the full tensor of which ``piece`` is this rank's piece; every rank calls this."""
        axes = self.axes()
        if not axes:
            return piece

        # pad each rank's values to the size of the largest piece, and gather them axis after axis
        boxes = self._boxes(axes)
        room = max(_numbers(box) for box in boxes)
        flat = piece.new_zeros(room)
        flat[: piece.numel()] = piece.reshape(-1)
        for axis in axes:
            gathered = flat.new_empty(flat.numel() * self.layout.grid[axis])
            dist.all_gather([*gathered.chunk(self.layout.grid[axis])], flat, group=self.groups[axis])
            flat = gathered

        # copy each piece to its place
        out = piece.new_empty(self.shape)
        for numbers, box in zip(flat.split(room) if room else (), boxes, strict=True):
            cut(out, box).copy_(numbers[: _numbers(box)].view(box.shape))
        return out

    def mine(self, full: Tensor) -> Tensor:
        """Returns this rank's piece of ``full``; it shares memory."""
        box = self.layout.box(self.rank)
        assert box is not None, f"rank {self.rank} has nothing of {self.layout}"
        return cut(full, box)

    def _boxes(self, axes: Sequence[str]) -> list[Box]:
        """Returns the boxes in the order that gathering over ``axes`` gives: the last axis is outermost."""
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
) -> dict[nn.Parameter, TensorPieces]:
    """Returns the ``TensorPieces`` of each parameter of ``rank``.

    ``groups`` has, for every axis, the ranks that differ from this one along it only.
    """
    return {p: TensorPieces(layout, rank, groups) for p, layout in layouts.items()}


def alone(t: Tensor) -> TensorPieces:
    """Returns the ``TensorPieces`` of a tensor that its rank has in full."""
    shape = tuple(t.shape)
    return TensorPieces(Layout(Grid(()), shape, ((),) * len(shape)), 0)


@torch.no_grad()
def add_up(terms: Iterable[tuple[TensorPieces, Iterable[int] | None, Tensor]]) -> None:
    """Sums each tensor over the ranks that split its dims, in place.

    A term is a sum over this rank's piece, along ``dims`` (``None`` for all). Terms over the same axes share
    a collective. Every rank with a piece calls this with the same number of terms, in the same order.
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
