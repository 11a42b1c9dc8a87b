"""Compares the copies of weights with which a step computes to the stored weights.

A step may compute with copies of the stored weights: gathered shards, half precision. The optimizer updates
the stored weights, so changes of a copy would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

AT_ONCE = 64 << 20
"""The most bytes of weights that are compared at once: the comparison needs as many bytes again."""


def state_of(weight: torch.Tensor) -> tuple[int, int]:
    """Returns numbers that change when a module writes to the weight or replaces its memory.

    A write through ``weight.data`` does not change them.
    """
    return 0 if weight.is_inference() else weight._version, weight.data_ptr()


@dataclass(frozen=True)
class Used:
    """A piece of a ``stored`` weight (``kept``), and the same piece of the ``copy`` that modules used."""

    stored: torch.Tensor
    kept: torch.Tensor
    copy: torch.Tensor


@dataclass(frozen=True)
class LostChanges:
    """Records which stored weights a module changed: ``toggled`` and ``overwritten`` contain their ids.

    ``differences`` has comparisons whose results are still on an accelerator: a number for each weight,
    positive if a value has changed. Reading them makes the CPU wait.
    """

    toggled: set[int] = field(default_factory=set)
    overwritten: set[int] = field(default_factory=set)
    differences: list[tuple[tuple[int, ...], torch.Tensor]] = field(default_factory=list)

    def note(self, stored: torch.Tensor, used: torch.Tensor, before: tuple[int, int]) -> None:
        """Compares a weight that a module ``used`` with ``stored``, and its ``state_of`` with ``before``."""
        if used.requires_grad != stored.requires_grad:
            self.toggled.add(id(stored))
        if state_of(used) != before:
            self.overwritten.add(id(stored))

    @torch.no_grad()
    def compare(self, pieces: Sequence[Used]) -> None:
        """Compares values, to find writes through ``weight.data``.

        Values that are NaN in both count as equal: the loss shows them.
        """
        pieces = [p for p in pieces if p.copy.numel()]
        if not pieces:
            return
        if pieces[0].copy.device.type == "cpu":
            self.overwritten.update(id(p.stored) for p in pieces if not _equal(p.kept, p.copy))
            return

        # a few kernels for many weights, and no result that the CPU has to wait for
        for some in _batches(pieces):
            copies = [p.copy for p in some]
            kept = [torch.empty_like(c) for c in copies]
            torch._foreach_copy_(kept, [p.kept for p in some])
            self.differences.append((tuple(id(p.stored) for p in some), largest_differences(copies, kept)))

    def differ(self, weights: Sequence[torch.Tensor], before: torch.Tensor, after: torch.Tensor) -> None:
        """Notes the ``weights`` whose digests ``before`` and ``after`` differ."""
        ids, changed = tuple(map(id, weights)), before != after
        if changed.device.type == "cpu":
            self.overwritten.update(i for i, differs in zip(ids, changed.tolist(), strict=True) if differs)
        else:
            self.differences.append((ids, changed.double()))

    def largest(self) -> torch.Tensor | None:
        """Returns the largest of the ``differences`` (fp64, 0-d, on their device); ``None`` without any."""
        if not self.differences:
            return None
        return torch.cat([apart.double() for _, apart in self.differences]).max()

    def settle(self, any_differs: bool) -> None:
        """Clears ``differences``; if ``any_differs``, first notes the weights that differ."""
        for ids, apart in self.differences if any_differs else ():
            self.overwritten.update(i for i, d in zip(ids, apart.tolist(), strict=True) if d > 0)
        self.differences.clear()


def largest_differences(ones: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
    """Returns for each pair of tensors the largest difference of two values; NaN and infinity do not hide it.

    A value that is NaN in only one of the two counts as equal too: the loss shows it.
    """
    apart = torch._foreach_sub(ones, others)
    for difference in apart:
        difference.nan_to_num_(0.0)
    return torch.stack(torch._foreach_norm(apart, torch.inf))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one = one.to(other.dtype)
    return torch.equal(one, other) or not bool(((one != other) & ~(one.isnan() & other.isnan())).any())


def _batches(pieces: Sequence[Used]) -> Iterator[list[Used]]:
    out: list[Used] = []
    total = 0
    for p in pieces:
        if out and (total + p.copy.nbytes > AT_ONCE or p.copy.dtype != out[0].copy.dtype):
            yield out
            out, total = [], 0
        out.append(p)
        total += p.copy.nbytes
    yield out
