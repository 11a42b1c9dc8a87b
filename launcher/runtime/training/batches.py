"""This rank's part of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.errors import RunError
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.outputs_and_targets import classes
from launcher.plan.plan import Plan
from launcher.plan.resolve.dataset_strategy import BatchRole
from launcher.runtime import device as devices
from launcher.runtime.cluster.messages import recv, send
from launcher.runtime.training.pipeline import SamplePlace, check_classes, check_ids, check_probabilities

Tensors = tuple[torch.Tensor, ...]
_Shapes = list[tuple[tuple[int, ...], str]]


def deal(hand: BatchRole, read: Callable[[], Tensors]) -> Tensors:
    """Returns the tensors, on the CPU, on a rank that uses them; an empty tuple on the others.

    ``read`` is called only on a rank that reads. Tensors travel between pairs of ranks of the default group,
    in host memory: the model's process groups are not in use then.
    """
    if hand.takes is not None:
        return _take(hand.takes)
    if not hand.reads:
        return ()
    tensors = read()
    for rank in hand.gives:
        _give(tensors, rank)
    return tensors if hand.uses else ()


def _give(tensors: Tensors, rank: int) -> None:
    """Sends shapes and dtypes first: the receiving rank has opened no file and does not know them."""
    send([(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors], _Shapes, rank)
    for t in tensors:
        dist.send(t.contiguous(), rank)


def _take(rank: int) -> Tensors:
    shapes: _Shapes = recv(_Shapes, rank)
    tensors = tuple(torch.empty(shape, dtype=dtype_of(dtype)) for shape, dtype in shapes)
    for t in tensors:
        dist.recv(t, rank)
    return tensors


Indices = npt.NDArray[np.int64]


class Samples(Protocol):
    """One split of a data set, indexed globally."""

    def __len__(self) -> int: ...
    def inputs(self, indices: Indices) -> tuple[Tensor, ...]: ...
    def targets(self, indices: Indices) -> Tensor: ...


class Stream(Protocol):
    """Samples that are read sequentially, and may report their position as JSON."""

    def place(self) -> dict[str, Any] | None: ...
    def go_on(self, place: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Batch:
    """``inputs`` on the first stage, ``targets`` on the last, else none; ``valid``: unpadded samples."""

    inputs: tuple[Tensor, ...]
    targets: Tensor | None
    valid: int


@dataclass(frozen=True)
class Feed:
    """The source of one rank's batches.

    ``order(step, batch_size, n)`` returns the global indices of one step. ``rank`` reads or receives its
    samples as the plan says. ``floating``: the dtype of floating-point inputs; ``exact``: the dtype of
    floating-point targets. ``limit``: train on this many first samples only. ``stream``: ``train`` if it is a
    stream.
    """

    train: Samples
    val: Samples
    order: Callable[[int, int, int], Indices]
    plan: Plan
    rank: int
    device: torch.device
    floating: torch.dtype
    exact: torch.dtype
    limit: int | None = None
    stream: Stream | None = None

    @cached_property
    def part(self) -> int:
        """This rank's data-parallel index."""
        at = self.plan.sizes.grid.coords(self.rank)
        return at["dp_replicate"] * self.plan.sizes.grid["dp_shard"] + at["dp_shard"]

    def batch(self, step: int) -> Batch:
        """Returns this rank's samples of optimizer step ``step`` (0-based)."""
        n = len(self.train) if self.limit is None else min(self.limit, len(self.train))
        indices = self.order(step, self.plan.sizes.global_batch, n)
        return self._read(self.train, indices, self.plan.sizes.local_batch, f"step {step + 1}")

    def held_out(self, batches: int | None) -> Iterator[Batch]:
        """Yields every held-out sample once, in order, in batches of training size; repeats pad the last."""
        yield from self._in_order(self.val, batches, "validation", targets=True)

    def inputs_in_order(self, source: Samples, batches: int | None, where: str) -> Iterator[Batch]:
        """Like ``held_out`` for any samples, without their targets."""
        yield from self._in_order(source, batches, where, targets=False)

    def _in_order(
        self, source: Samples, batches: int | None, where: str, *, targets: bool
    ) -> Iterator[Batch]:
        size = self.plan.sizes.global_batch
        n = len(source)
        count = -(-n // size)  # ceil
        if batches is not None:
            count = min(batches, count)
        for b in range(count):
            indices = np.arange(b * size, (b + 1) * size)
            valid = int((indices[self._mine] < n).sum())
            yield self._read(source, np.minimum(indices, n - 1), valid, where, targets=targets)

    @property
    def _mine(self) -> slice:
        n = self.plan.sizes.local_batch
        return slice(self.part * n, (self.part + 1) * n)

    def _read(
        self, source: Samples, indices: Indices, valid: int, where: str, *, targets: bool = True
    ) -> Batch:
        """Reads a part of the global batch, whose samples are ``indices``; keeps this rank's slice of it."""
        # determine which samples are read, and which of them belong to this rank
        size = self.plan.sizes.global_batch // self.plan.reading.parts
        start = self._mine.start // size * size
        read = indices[start : start + size]
        keep = slice(self._mine.start - start, self._mine.stop - start)
        split = "training" if source is self.train else "held-out"

        # read them here, or receive them from the rank that reads them
        for_inputs, for_targets = self._hands

        def read_inputs() -> tuple[Tensor, ...]:
            inputs = [_each(t, read, where, split) for t in source.inputs(read)]
            check_ids(inputs, read % len(source), self.plan.observed.lookups, SamplePlace(where, split))
            return tuple(t[keep] for t in inputs)

        def read_targets() -> tuple[Tensor, ...]:
            return (self._targets(source, read, where, split)[keep],)

        inputs = tuple(self._move(t, self.floating) for t in deal(for_inputs, read_inputs))
        target_tensors: tuple[Tensor, ...] = ()
        if targets:
            target_tensors = tuple(self._move(t, self.exact) for t in deal(for_targets, read_targets))
        return Batch(inputs, target_tensors[0] if target_tensors else None, valid)

    def _targets(self, source: Samples, read: Indices, where: str, split: str) -> Tensor:
        """Returns the targets, checked on the CPU by the rank that reads them.

        So no rank has to wait for a GPU.
        """
        targets = _each(source.targets(read), read, where, split)
        objective, at = self.plan.objective, SamplePlace(where, split)
        count = classes(self.plan, targets.shape)
        if count is not None:
            check_classes(
                targets, read % len(source), count, objective.ignored, at
            )  # indices go on over epochs
        elif objective.loss == "bce":
            check_probabilities(targets, read % len(source), at)
        return targets

    @cached_property
    def _hands(self) -> tuple[BatchRole, BatchRole]:
        return self.plan.batch_roles(self.rank)

    def _move(self, t: Tensor, floating: torch.dtype) -> Tensor:
        """Moves a tensor to the device from pinned memory, without waiting for the step before.

        torch keeps that memory until the copy has finished.
        """
        dtype = floating if t.is_floating_point() else t.dtype
        t = t.to(dtype)
        if devices.is_accelerator(self.device):
            t = devices.pinned(t)
        return t.to(self.device, non_blocking=True)


def _each(t: Tensor, read: Indices, where: str, split: str) -> Tensor:
    """Returns ``t`` itself. Raises ``RunError`` unless it has one entry for each index."""
    if len(t) != len(read):
        text = f"{where}: {len(read)} {split} samples were requested, and the data returned {len(t)}"
        raise RunError(f"{text}, in a tensor of shape {tuple(t.shape)}; return one for each index, in order")
    return t
