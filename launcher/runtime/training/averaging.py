"""The moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from launcher.parallel.local_tensors import local
from launcher.parallel.parallel_model import ParallelModel
from launcher.plan.cut.tensor_placement import Placed


class WeightAverage:
    """A moving average of each trained parameter's first copy on this rank.

    After every ``every``-th optimizer step it becomes ``decay`` times itself plus ``1 - decay`` times the
    weights. At its first use it is a copy of the weights: those with which training starts.
    """

    def __init__(self, model: ParallelModel, decay: float, every: int) -> None:
        self._model, self._share, self._every = model, 1.0 - decay, every
        self._means: dict[str, Tensor] = {}
        self.begun = self.swapped = False

    def begin(self) -> None:
        """Starts from the current weights, unless it has started."""
        if not self.begun:
            self.begin_again()

    @torch.no_grad()
    def begin_again(self) -> None:
        """Starts from the current weights, reusing its memory."""
        for p, w in self._trained():
            if p.name in self._means:
                self._means[p.name].copy_(w)
            else:
                self._means[p.name] = w.clone()
        self.begun = True

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Updates the average after optimizer step ``step`` (from 1)."""
        if step % self._every == 0:
            for p, w in self._trained():
                self._means[p.name].lerp_(w, self._share)

    def named(self) -> list[tuple[Placed, Tensor]]:
        """Returns this rank's shard of each average; empty before the average has started."""
        return [(p, self._means[p.name]) for p, _ in self._trained() if p.name in self._means]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps the average into the model for the block."""
        self.begin()
        self._swap()
        self.swapped = True
        try:
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Swaps the model's weights back before the end of an ``in_place`` block, to save a checkpoint."""
        if self.swapped:
            self._swap()
            self.swapped = False

    @torch.no_grad()
    def _swap(self) -> None:
        for p, w in self._trained():
            weight = w.clone()
            w.copy_(self._means[p.name])
            self._means[p.name].copy_(weight)

        # update all other copies on this rank from the first one
        first = {p.name: w for p, w in self._trained()}
        for name, t in self._model.trainable():
            own = local(t.detach())
            if own.data_ptr() != first[self._model.first_name(name)].data_ptr():
                own.copy_(first[self._model.first_name(name)])

    def _trained(self) -> list[tuple[Placed, Tensor]]:
        """Returns this rank's shards of the first copies of trained parameters.

        They share memory with the model.
        """
        return [(p, local(t.detach())) for p, t in self._model.named() if p.trainable and not p.buffer]
