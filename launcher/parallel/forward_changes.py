"""Reports changes to weights and buffers by a forward that would make ranks train other numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from launcher.parallel.copied_weight_changes import LostChanges
from launcher.parallel.digests import digests
from launcher.parallel.local_tensors import local
from launcher.parallel.model_state.shared_state import StepsOfSharedState
from launcher.parallel.running_statistics import Statistics
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.plan import Plan
from launcher.plan.values.module_names import listed


@dataclass(frozen=True)
class ForwardChanges:
    """The changes that this rank has noted since ``take`` was called.

    ``parameters`` are this rank's parameters. ``direct`` are the parameters that stages use directly, not
    through a copy. ``copies`` has the changes of copies: gathered shards and half-precision weights.
    ``shared`` is the Python state that other stages share with those of this rank, and ``late`` has its
    places that a step has changed. ``statistics`` compares buffers over data-parallel ranks. ``own`` has the
    changes of ``direct``.
    """

    parameters: Sequence[tuple[Placed, torch.Tensor]]
    staged: bool
    direct: Sequence[torch.Tensor]
    copies: Sequence[LostChanges]
    statistics: Statistics
    shared: StepsOfSharedState | None = None
    late: dict[str, None] = field(default_factory=dict)
    own: LostChanges = field(default_factory=LostChanges)

    @contextmanager
    def watching_stages(self) -> Iterator[None]:
        """Compares ``direct`` and ``shared`` before and after the work of a step, which runs inside.

        autograd refuses a backward after a write in place, but not after a write through ``weight.data``.
        """
        if not torch.is_grad_enabled():
            yield
            return
        if self.shared is not None:
            self.shared.begin()
        before = digests([*map(local, self.direct)]) if self.direct else None
        yield
        if before is not None:
            self.own.differ(self.direct, before, digests([*map(local, self.direct)]))
        if self.shared is not None:
            self.late.update(dict.fromkeys(self.shared.lost()))

    @property
    def unread(self) -> bool:
        """True if ``take`` would have to wait for a device and read the results of its comparisons."""
        return bool(self.statistics.apart) or any(noted.differences for noted in self._noted)

    def any_difference(self) -> torch.Tensor:
        """Returns a number (fp64, 0-d) that is positive if a comparison on a device found a difference.

        It stays on the device, so that it can be copied to the CPU together with other numbers.
        """
        each = [d for noted in self._noted if (d := noted.largest()) is not None]
        each += [apart.any().double() for _, apart in self.statistics.apart]
        return torch.stack(each).max() if each else torch.zeros((), dtype=torch.float64)

    def take(self, any_difference: bool) -> str:
        """Returns a message with the changes and the way out, or "", and clears the comparisons of devices.

        ``any_difference`` tells whether the result of the method of that name is positive; if it is, this
        waits for the device.
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
        elif self.late:
            text = f"a forward changed {listed([*self.late])}, which other stages read in their own processes"
            cure = "pass it as an argument, or name a larger module in stage_config"
        elif apart:
            text = f"the forward changed {listed(apart)} using the samples of one data-parallel rank only"
            cure = "compute it from all samples, or train with one data-parallel rank"
        else:
            return ""
        return f"{text}, so this layout would train other numbers than one device; {cure}"

    @property
    def _noted(self) -> tuple[LostChanges, ...]:
        return (self.own, *self.copies)

    def _overwritten(self) -> list[str]:
        """Returns the parameters whose values have changed."""
        lost = set[int]().union(*(noted.overwritten for noted in self._noted))
        return [placed.name for placed, t in self.parameters if id(t) in lost]

    def _toggled(self) -> list[str]:
        """Returns the parameters whose ``requires_grad`` has changed: on a copy or, in a pipeline, on any."""
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
    shared: StepsOfSharedState | None,
) -> ForwardChanges:
    """Returns the ``ForwardChanges`` that watch the tensors ``named``.

    ``copied`` are the parameters that a step uses through a half-precision copy. Parameters that the forward
    changed during planning are not watched, because the plan accounts for them. ``shared``: the Python state
    that this rank's stages share with others.
    """
    staged = len(plan.stages) > 1
    parameters = [(placed, t) for placed, t in named if not placed.buffer]
    skipped, changed = {*map(id, copied)}, {*plan.observed.changed}
    direct = [
        t
        for placed, t in parameters
        if not placed.sharded and id(t) not in skipped and changed.isdisjoint(placed.names)
    ]
    return ForwardChanges(parameters, staged, direct if staged else (), copies, statistics, shared)
