"""How a tensor gets from one layout to another: a few collectives, planned and counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from launcher.plan.sharding.redistribution.search import LATENCY, cheapest
from launcher.plan.sharding.redistribution.step import Collective, Step
from launcher.plan.sharding.tensor_layout import TensorLayout


@dataclass(frozen=True)
class Redistribution:
    """Of a tensor of ``shape`` from ``src`` to ``dst``; without steps where they say the same."""

    src: TensorLayout
    dst: TensorLayout
    shape: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def collectives(self) -> int:
        return sum(step.op != "slice" for step in self.steps)

    @cached_property
    def elements(self) -> int:
        """That a rank receives."""
        return sum(step.elements for step in self.steps)

    def cost(self, itemsize: int) -> int:
        """In bytes, with what could be received while collectives start."""
        return self.elements * itemsize + self.collectives * LATENCY

    def traffic(self, rank: int) -> tuple[Collective, ...]:
        """The collectives that ``rank`` of the stage calls, in their order."""
        calls = (step.collective(rank) for step in self.steps)
        return tuple(call for call in calls if call is not None)


@lru_cache(maxsize=1 << 16)
def redistribution(
    src: TensorLayout, dst: TensorLayout, shape: tuple[int, ...], itemsize: int = 4
) -> Redistribution:
    """The cheapest by bytes received and ``LATENCY`` for each collective; of equals the more regular."""
    assert src.divides(shape), f"{src} does not cut {shape} evenly"
    assert dst.divides(shape), f"{dst} does not cut {shape} evenly"
    if src == dst or src.canonical == dst.canonical:
        return Redistribution(src, dst, shape, ())
    assert not dst.partial, f"nothing is made into terms of a sum: {dst}"
    return Redistribution(src, dst, shape, cheapest(src, dst, shape, itemsize))


def back(
    src: TensorLayout, dst: TensorLayout, terms: tuple[int, ...], shape: tuple[int, ...], itemsize: int = 4
) -> Redistribution:
    """Of the gradient: it comes back in ``dst``, over axes ``terms`` of its matrix as terms of a sum.

    Terms of a sum in ``src`` have each the whole gradient of their sum.
    """
    return redistribution(TensorLayout(dst.matrix, dst.dims, terms), src.summed(), shape, itemsize)
