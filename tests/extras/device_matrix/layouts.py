"""Random layouts: any device matrix, any dim split by any axes in any order."""

from __future__ import annotations

import math
import random

from launcher.extras.device_matrix.layout import TensorLayout


def factored(n: int, rng: random.Random) -> tuple[int, ...]:
    """Return an ordered factorization of ``n``, sometimes with an axis of size one."""
    out: list[int] = []
    while n > 1:
        factor = rng.choice([f for f in range(2, n + 1) if n % f == 0])
        out.append(factor)
        n //= factor
    if rng.random() < 0.1:
        out.insert(rng.randint(0, len(out)), 1)
    return tuple(out)


def drawn(ranks: int, dims: int, rng: random.Random, partial: bool = False) -> TensorLayout:
    """Draw a layout over a matrix of its own; with ``partial`` it may be terms of a sum."""
    matrix = factored(ranks, rng)
    axes = list(range(len(matrix)))
    rng.shuffle(axes)
    cuts: list[list[int]] = [[] for _ in range(dims)]
    terms: list[int] = []
    for a in axes:
        place = rng.randrange(dims + 1 + partial)
        if place < dims:
            cuts[place].append(a)
        elif place > dims:
            terms.append(a)
    return TensorLayout(matrix, tuple(map(tuple, cuts)), tuple(sorted(terms)))


def drawn_shape(layouts: list[TensorLayout], rng: random.Random) -> tuple[int, ...]:
    """Draw the shape of a small tensor that all layouts split evenly, sometimes as small as possible."""
    slices = zip(*(layout.slices for layout in layouts), strict=True)
    return tuple(math.lcm(*ways) * rng.choice([1, 1, 2, 3]) for ways in slices)
