"""Gathers the sharded weights of a rank once per step, group after group, ahead of their use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.distributed.fsdp import FSDPModule

from launcher.parallel.fsdp.gather_order import GatherOrder
from launcher.plan.cost.gather_order import Gathering


class Prefetch:
    """The gathers of a rank over all of its stages, and how many of them have begun.

    Every rank begins its gathers in the plan's order, whatever code its data makes it skip. FSDP2 waits for
    each when a module of the group is first called.
    """

    def __init__(self, turns: tuple[Gathering, ...], orders: Iterable[GatherOrder]) -> None:
        of = {i: order for order in orders for i in order.rows}
        self._turns = turns
        self._orders = [of[t.group] for t in turns]
        self._at = {t.group: n for n, t in enumerate(turns)}
        self._begun = len(turns)
        self._settled: set[int] = set()
        for order in self._orders:
            order.before_use = self.reach

    def start(self) -> None:
        """Begin a step or an evaluation, after the optimizer has updated the weights."""
        self.end()  # of a step that failed
        self._begun = 0
        self._settled.clear()
        if self._turns:
            self.reach(self._turns[0].group)

    def reach(self, group: int) -> None:
        """Begin the gathers that are due before ``group`` is used."""
        until = self._turns[self._at[group]].until
        while self._begun < until:
            order, i = self._orders[self._begun], self._turns[self._begun].group
            module = order.part.module.get_submodule(order.rows[i].modules[0])
            assert isinstance(module, FSDPModule)
            module.unshard(async_op=True)
            self._begun += 1

    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        """Enter around a forward of ``stage``.

        After its first forward all of its groups are gathered, used or not.
        """
        if stage in self._settled:
            yield
            return
        mine = [n for n, order in enumerate(self._orders) if order.part.stage.index == stage]
        self._wait(n for n in mine if self._turns[n].early)
        yield
        self._wait(mine)
        self._settled.add(stage)

    def _wait(self, turns: Iterable[int]) -> None:
        for n in turns:
            group = self._turns[n].group
            self.reach(group)
            self._orders[n].groups[group].wait_for_unshard()

    def end(self) -> None:
        """Free the weights that no backward has freed, such as those of an evaluation."""
        for turn, order in zip(self._turns, self._orders, strict=True):
            group = order.groups[turn.group]
            group.wait_for_unshard()
            group._to_sharded()
