"""Gives each rank its part of every batch: the plan and the seed alone say which samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from launcher.errors import RunError
from launcher.plan.plan import Plan
from launcher.plan.sample_checks import classes
from launcher.plan.values.batch_reading import BatchRole
from launcher.runtime import device as devices
from launcher.runtime.training.batch_transfer import deal
from launcher.runtime.training.target_values import Place, check_classes, check_ids, check_shares

Indices = npt.NDArray[np.int64]


class Samples(Protocol):
    """One split of a data set, by global index."""

    def __len__(self) -> int: ...
    def inputs(self, indices: Indices) -> tuple[Tensor, ...]: ...
    def targets(self, indices: Indices) -> Tensor: ...


class Stream(Protocol):
    """Samples that are read one after the other, and may say where they are, in JSON."""

    def place(self) -> dict[str, Any] | None: ...
    def go_on(self, place: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Batch:
    """``inputs`` on the first stage, ``targets`` on the last, else none; ``valid`` samples are no padding."""

    inputs: tuple[Tensor, ...]
    targets: Tensor | None
    valid: int


@dataclass(frozen=True)
class Feed:
    """``order(step, batch_size, n)``: global indices of one step. ``rank`` is handed what the plan says.

    ``floating``: the dtype of inputs that are no whole numbers, ``exact`` that of such targets. ``limit``:
    train on these first samples only. ``stream``: ``train``, where that is one.
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
        """This rank's data-parallel place."""
        at = self.plan.sizes.grid.coords(self.rank)
        return at["dp_replicate"] * self.plan.sizes.grid["dp_shard"] + at["dp_shard"]

    def batch(self, step: int) -> Batch:
        """This rank's samples of optimizer step ``step`` (0-based)."""
        n = len(self.train) if self.limit is None else min(self.limit, len(self.train))
        indices = self.order(step, self.plan.sizes.global_batch, n)
        return self._read(self.train, indices, self.plan.sizes.local_batch, f"step {step + 1}")

    def held_out(self, batches: int | None) -> Iterator[Batch]:
        """Every held-out sample once, in order, in training-sized batches; repeats pad the last."""
        yield from self._in_order(self.val, batches, "validation", targets=True)

    def inputs_in_order(self, source: Samples, batches: int | None, where: str) -> Iterator[Batch]:
        """As ``held_out`` of any samples, without their targets."""
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
        """``indices`` are the global batch's; a part of them is read, and of that a slice kept."""
        # which samples are read, and which of them are this rank's
        size = self.plan.sizes.global_batch // self.plan.reading.parts
        start = self._mine.start // size * size
        read = indices[start : start + size]
        keep = slice(self._mine.start - start, self._mine.stop - start)
        split = "training" if source is self.train else "held-out"

        # read here, or handed over by the rank that reads them
        for_inputs, for_targets = self._hands

        def read_inputs() -> tuple[Tensor, ...]:
            inputs = [_each(t, read, where, split) for t in source.inputs(read)]
            check_ids(inputs, read % len(source), self.plan.observed.lookups, Place(where, split))
            return tuple(t[keep] for t in inputs)

        def read_targets() -> tuple[Tensor, ...]:
            return (self._targets(source, read, where, split)[keep],)

        inputs = tuple(self._move(t, self.floating) for t in deal(for_inputs, read_inputs))
        wanted: tuple[Tensor, ...] = ()
        if targets:
            wanted = tuple(self._move(t, self.exact) for t in deal(for_targets, read_targets))
        return Batch(inputs, wanted[0] if wanted else None, valid)

    def _targets(self, source: Samples, read: Indices, where: str, split: str) -> Tensor:
        """Checked by who reads them, still on the CPU: nobody has to wait for a GPU to know."""
        targets = _each(source.targets(read), read, where, split)
        objective, at = self.plan.objective, Place(where, split)
        count = classes(self.plan, targets.shape)
        if count is not None:
            check_classes(targets, read % len(source), count, objective.ignored, at)  # of one of many epochs
        elif objective.loss == "bce":
            check_shares(targets, read % len(source), at)
        return targets

    @cached_property
    def _hands(self) -> tuple[BatchRole, BatchRole]:
        return self.plan.batch_roles(self.rank)

    def _move(self, t: Tensor, floating: torch.dtype) -> Tensor:
        """To the device, from pinned memory: nobody waits for it to be done with the step before.

        torch keeps that memory until the copy is made.
        """
        dtype = floating if t.is_floating_point() else t.dtype
        t = t.to(dtype)
        if devices.is_accelerator(self.device):
            t = devices.pinned(t)
        return t.to(self.device, non_blocking=True)


def _each(t: Tensor, read: Indices, where: str, split: str) -> Tensor:
    """``t`` itself, one for each index. Raises ``RunError``."""
    if len(t) != len(read):
        text = f"{where}: {len(read)} {split} samples were requested, and the data returned {len(t)}"
        raise RunError(
            f"{text}, in a tensor of shape {tuple(t.shape)}; return one for each index, in their order"
        )
    return t
