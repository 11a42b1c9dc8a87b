"""Reports what forwards have changed of weights and buffers, where ranks would train other numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from launcher.parallel.digests import digests
from launcher.parallel.lost_changes import LostChanges
from launcher.parallel.mesh import local
from launcher.parallel.running_statistics import Statistics
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.plan import Plan
from launcher.plan.values.module_names import listed


@dataclass(frozen=True)
class ForwardChanges:
    """The changes that this rank has noted since ``take`` was called.

    ``parameters`` are those of this rank. ``whole`` are those of them that stages compute with themselves,
    not with copies. ``copies`` has the changes of copies: gathered shards and half precision. ``statistics``
    compares buffers over data-parallel ranks. ``own`` has the changes of ``whole``.
    """

    parameters: Sequence[tuple[Placed, torch.Tensor]]
    staged: bool
    whole: Sequence[torch.Tensor]
    copies: Sequence[LostChanges]
    statistics: Statistics
    own: LostChanges = field(default_factory=LostChanges)

    @contextmanager
    def watching_stages(self) -> Iterator[None]:
        """Enter around the forwards and backwards of a step: compares ``whole`` before and after them.

        autograd refuses a backward after a write in place, but not after one through ``weight.data``.
        """
        if not self.whole or not torch.is_grad_enabled():
            yield
            return
        before = digests([*map(local, self.whole)])
        yield
        self.own.differ(self.whole, before, digests([*map(local, self.whole)]))

    @property
    def unread(self) -> bool:
        """True if ``take`` would have to read what a device has compared, and to wait for it."""
        return bool(self.statistics.apart) or any(noted.differences for noted in self._noted)

    def any_difference(self) -> torch.Tensor:
        """Return a number (fp64, 0-d) that is positive if a device has found a difference.

        It is on the device, so that it can be copied to the CPU with other numbers.
        """
        each = [d for noted in self._noted if (d := noted.largest()) is not None]
        each += [apart.any().double() for _, apart in self.statistics.apart]
        return torch.stack(each).max() if each else torch.zeros((), dtype=torch.float64)

    def take(self, any_difference: bool) -> str:
        """Return what was changed and the way out, "" for nothing, and forget what devices have compared.

        ``any_difference``: whether the number of that name is positive; if so, waits for the device.
        """
        for noted in self._noted:
            noted.settle(any_difference)
        apart = self.statistics.differing() if any_difference else []
        self.statistics.apart.clear()
        one_rank = "or train with one rank in fp32"
        if toggled := self._toggled():
            text = f"the forward changed requires_grad of {listed(toggled)}"
            cure = f"freeze it in the constructor, or detach() its output, {one_rank}"
        elif overwritten := self._overwritten():
            text = f"the forward changed {listed(overwritten)}"
            cure = f"let the forward compute with a copy, {one_rank}"
        elif apart:
            text = f"the forward changed {listed(apart)} by the samples of one data-parallel rank"
            cure = "compute it from all samples, or train with one data-parallel rank"
        else:
            return ""
        return f"{text}, and this layout would train to other numbers; {cure}"

    @property
    def _noted(self) -> tuple[LostChanges, ...]:
        return (self.own, *self.copies)

    def _overwritten(self) -> list[str]:
        """Return the parameters whose values have changed."""
        lost = set[int]().union(*(noted.overwritten for noted in self._noted))
        return [placed.name for placed, t in self.parameters if id(t) in lost]

    def _toggled(self) -> list[str]:
        """Return the parameters whose ``requires_grad`` has changed, of a copy or, in a pipeline, of any."""
        lost = set[int]().union(*(noted.toggled for noted in self._noted))
        return [
            placed.name
            for placed, t in self.parameters
            if id(t) in lost or (self.staged and t.requires_grad != placed.trainable)
        ]


def forward_changes(
    named: Sequence[tuple[Placed, torch.Tensor]],
    plan: Plan,
    copied: Sequence[torch.Tensor],
    copies: Sequence[LostChanges],
    statistics: Statistics,
) -> ForwardChanges:
    """Return what is to be watched of the tensors ``named``.

    ``copied``: parameters of which a step computes with a half-precision copy. The plan follows parameters
    that a forward changed when it was planned.
    """
    staged = len(plan.stages) > 1
    parameters = [(placed, t) for placed, t in named if not placed.buffer]
    skipped, changed = {*map(id, copied)}, {*plan.observed.changed}
    whole = [
        t
        for placed, t in parameters
        if not placed.sharded and id(t) not in skipped and changed.isdisjoint(placed.names)
    ]
    return ForwardChanges(parameters, staged, whole if staged else (), copies, statistics)
