"""Counts of what the kernels of a device do: matrix products, attention, and bytes that go through memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """``batch`` matrix products of (m, k) and (k, n), with elements of ``itemsize`` bytes."""

    m: int
    n: int
    k: int
    batch: int = 1
    itemsize: int = 4

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""
        return self.itemsize * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class Operations:
    """The operations of a part of a forward or backward.

    ``products``: each matrix product, and how often it runs. ``attention``: flops of fused attention kernels,
    without masked positions. ``moved``: bytes that all other kernels read and write. ``kernels``: the number
    of kernels of all kinds.
    """

    products: tuple[tuple[Product, int], ...] = ()
    attention: int = 0
    moved: int = 0
    kernels: int = 0

    def __sub__(self, other: Operations) -> Operations:
        """Returns the rest without ``other``, which is a part of these."""
        rest = Counter(dict(self.products))
        rest.subtract(dict(other.products))
        return Operations(
            tuple((p, n) for p, n in rest.items() if n > 0),
            max(0, self.attention - other.attention),
            max(0, self.moved - other.moved),
            max(0, self.kernels - other.kernels),
        )

    @property
    def flops(self) -> int:
        return self.attention + sum(p.flops * n for p, n in self.products)

    @property
    def backward(self) -> Operations:
        """An estimate for the backward, where it is not traced: each product has two gradients."""
        return Operations(
            tuple((p, 2 * n) for p, n in self.products),
            self.attention * 5 // 2,
            2 * self.moved,
            2 * self.kernels,
        )


NOTHING = Operations()


def total(several: Iterable[Operations]) -> Operations:
    """Returns the sum of ``several``, with equal products counted together."""
    products: Counter[Product] = Counter()
    attention = moved = kernels = 0
    for one in several:
        for product, times in one.products:
            products[product] += times
        attention += one.attention
        moved += one.moved
        kernels += one.kernels
    return Operations(tuple(products.items()), attention, moved, kernels)
