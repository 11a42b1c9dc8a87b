"""The collectives that take a tensor from one layout to another, and their cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from launcher.plan.sharding.redistribution.search import LATENCY, cheapest
from launcher.plan.sharding.redistribution.step import Collective, Step
from launcher.plan.sharding.tensor_layout import TensorLayout


@dataclass(frozen=True)
class Redistribution:
    """The steps that take a tensor of ``shape`` from ``src`` to ``dst``; none if both layouts are equal."""

    src: TensorLayout
    dst: TensorLayout
    shape: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def collectives(self) -> int:
        return sum(step.op != "slice" for step in self.steps)

    @cached_property
    def elements(self) -> int:
        """The number of elements that a rank receives."""
        return sum(step.elements for step in self.steps)

    def cost(self, itemsize: int) -> int:
        """The cost in bytes, including ``LATENCY`` for each collective."""
        return self.elements * itemsize + self.collectives * LATENCY

    def traffic(self, rank: int) -> tuple[Collective, ...]:
        """The collectives that ``rank`` of the stage calls, in order."""
        calls = (step.collective(rank) for step in self.steps)
        return tuple(call for call in calls if call is not None)


@lru_cache(maxsize=1 << 16)
def redistribution(
    src: TensorLayout, dst: TensorLayout, shape: tuple[int, ...], itemsize: int = 4
) -> Redistribution:
    """Returns the cheapest redistribution by bytes received and ``LATENCY`` for each collective.

    Among equally cheap ones, one with fewer exchanges wins. ``itemsize``: bytes per element.
    """
    assert src.divides(shape), f"{src} does not cut {shape} evenly"
    assert dst.divides(shape), f"{dst} does not cut {shape} evenly"
    if src == dst or src.canonical == dst.canonical:
        return Redistribution(src, dst, shape, ())
    assert not dst.partial, f"nothing is made into terms of a sum: {dst}"
    return Redistribution(src, dst, shape, cheapest(src, dst, shape, itemsize))


def back(
    src: TensorLayout, dst: TensorLayout, terms: tuple[int, ...], shape: tuple[int, ...], itemsize: int = 4
) -> Redistribution:
    """Returns the redistribution of the gradient of a value that was moved from ``src`` to ``dst``.

    The gradient has the layout ``dst`` and consists of terms of a sum over the axes ``terms`` of its matrix.
    If ``src`` consists of terms of a sum, each term gets the full gradient of the sum.
    """
    return redistribution(TensorLayout(dst.matrix, dst.dims, terms), src.summed(), shape, itemsize)
