"""Notes what a forward changes of the weights that it computes with, where ranks would train other numbers.

A step may compute with copies: gathered shards, half precision. The stored weights are trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

AT_ONCE = 64 << 20
"""Most bytes of weights that are compared at once, as that takes as many again."""


def state_of(weight: torch.Tensor) -> tuple[int, int]:
    """Return numbers that differ once a module has written to a weight, or given it other memory.

    They stay the same if it writes through ``weight.data``.
    """
    return 0 if weight.is_inference() else weight._version, weight.data_ptr()


@dataclass(frozen=True)
class Used:
    """The same piece of a ``stored`` weight, ``kept``, and of the ``copy`` that modules computed with."""

    stored: torch.Tensor
    kept: torch.Tensor
    copy: torch.Tensor


@dataclass(frozen=True)
class LostChanges:
    """Stored weights, by id, of which a module has changed ``requires_grad``, or values, while it ran.

    ``differences`` are on an accelerator: for some weights a positive number if a value has changed. Reading
    them makes the CPU wait.
    """

    toggled: set[int] = field(default_factory=set)
    overwritten: set[int] = field(default_factory=set)
    differences: list[tuple[tuple[int, ...], torch.Tensor]] = field(default_factory=list)

    def note(self, stored: torch.Tensor, used: torch.Tensor, before: tuple[int, int]) -> None:
        """Compare what a module has computed with; ``before``: its ``state_of`` before that."""
        if used.requires_grad != stored.requires_grad:
            self.toggled.add(id(stored))
        if state_of(used) != before:
            self.overwritten.add(id(stored))

    @torch.no_grad()
    def compare(self, pieces: Sequence[Used]) -> None:
        """Compare values, which finds what was written through ``weight.data``.

        A weight that is not a number anywhere counts as equal there: the loss shows that.
        """
        pieces = [p for p in pieces if p.copy.numel()]
        if not pieces:
            return
        if pieces[0].copy.device.type == "cpu":
            self.overwritten.update(id(p.stored) for p in pieces if not _equal(p.kept, p.copy))
            return

        # a few kernels for many weights, and no answer that the CPU would wait for
        for some in _batches(pieces):
            copies = [p.copy for p in some]
            kept = [torch.empty_like(c) for c in copies]
            torch._foreach_copy_(kept, [p.kept for p in some])
            apart = torch._foreach_norm(torch._foreach_sub(copies, kept), torch.inf)
            self.differences.append((tuple(id(p.stored) for p in some), torch.stack(apart)))

    def differ(self, weights: Sequence[torch.Tensor], before: torch.Tensor, after: torch.Tensor) -> None:
        """Note the ``weights`` whose ``digests`` differ."""
        ids, changed = tuple(map(id, weights)), before != after
        if changed.device.type == "cpu":
            self.overwritten.update(i for i, differs in zip(ids, changed.tolist(), strict=True) if differs)
        else:
            self.differences.append((ids, changed.double()))

    def largest(self) -> torch.Tensor | None:
        """Return the largest of the ``differences`` (fp64, 0-d, on their device); ``None`` without any."""
        if not self.differences:
            return None
        return torch.cat([apart.double() for _, apart in self.differences]).nan_to_num(0.0, torch.inf).max()

    def settle(self, any_differs: bool) -> None:
        """Forget the ``differences``; if ``any_differs``, note the weights they are of first."""
        for ids, apart in self.differences if any_differs else ():
            self.overwritten.update(i for i, d in zip(ids, apart.tolist(), strict=True) if d > 0)
        self.differences.clear()


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
