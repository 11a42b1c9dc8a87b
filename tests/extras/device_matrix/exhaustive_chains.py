"""The cheapest chain of collectives, found by trying all chains.

Each collective is over one axis of a common mesh.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

from launcher.extras.device_matrix.all_to_all_v import on_common_mesh
from launcher.extras.device_matrix.layout import TensorLayout

State = tuple[tuple[tuple[int, ...], ...], frozenset[int]]


def cheapest_chain(
    src: TensorLayout, dst: TensorLayout, shape: tuple[int, ...], itemsize: int, latency: int
) -> int | None:
    """Return the cost of the cheapest chain, or ``None`` if there is no common mesh."""
    pair = on_common_mesh(src, dst)
    if pair is None:
        return None
    sizes = pair[0].matrix
    start, goal = ((layout.dims, frozenset(layout.partial)) for layout in pair)
    tick, done = itertools.count(), set()
    heap = [(0, next(tick), start)]
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state == goal:
            return cost
        if state in done:
            continue
        done.add(state)
        local = math.prod(shape) // math.prod(sizes[a] for axes in state[0] for a in axes)
        for share, after in moves(state, sizes):
            ways = [math.prod(sizes[a] for a in axes) for axes in after[0]]
            if all(n % k == 0 for n, k in zip(shape, ways, strict=True)):
                more = math.ceil(share * local) * itemsize + (latency if share else 0)
                heapq.heappush(heap, (cost + more, next(tick), after))
    return None  # every chain has a layout that does not divide the shape


def moves(state: State, sizes: tuple[int, ...]) -> Iterator[tuple[Fraction | int, State]]:
    """Yield (elements received, as a share of a rank's part; the state after it).

    Slicing receives nothing.
    """
    dims, partial = state
    used = {a for axes in dims for a in axes} | partial

    def cut(changed: dict[int, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return tuple(changed.get(d, axes) for d, axes in enumerate(dims))

    for d, axes in enumerate(dims):
        for a in set(range(len(sizes))) - used:
            yield 0, (cut({d: (*axes, a)}), partial)
        for a in partial:
            yield Fraction(sizes[a] - 1, sizes[a]), (cut({d: (*axes, a)}), partial - {a})
        if axes:
            n = sizes[axes[-1]]
            yield n - 1, (cut({d: axes[:-1]}), partial)
            for e in range(len(dims)):
                if e != d:
                    yield Fraction(n - 1, n), (cut({d: axes[:-1], e: (*dims[e], axes[-1])}), partial)
    for a in partial:
        yield Fraction(2 * (sizes[a] - 1), sizes[a]), (dims, partial - {a})
