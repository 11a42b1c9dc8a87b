"""Exchanges, which move a tensor from any layout to any other in one collective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.plan.values.grid import axis_spans
from launcher.plan.values.layout import Box, common_axes


@lru_cache(maxsize=1 << 16)
def on_common_mesh(a: TensorLayout, b: TensorLayout) -> tuple[TensorLayout, TensorLayout] | None:
    """Returns both layouts over the same axes.

    ``None`` if no matrix refines both, as for ``(3, 4)`` and ``(4, 3)``.

    >>> on_common_mesh(TensorLayout((8,), ((0,), ())), TensorLayout((2, 4), ((1,), (0,))))[0]
    TensorLayout(matrix=(2, 4), dims=((0, 1), ()), partial=())
    """
    assert a.ranks == b.ranks, f"{a} and {b} are not over the same ranks"
    a, b = a.canonical, b.canonical

    # row-major matrices share a refinement exactly when their strides form one chain of divisors
    axes = common_axes((axis_spans(a.matrix), axis_spans(b.matrix)), a.ranks)
    if axes is None:
        return None
    sizes = tuple(axis.size for axis in axes)
    return _over(a, sizes), _over(b, sizes)


def _over(layout: TensorLayout, sizes: tuple[int, ...]) -> TensorLayout:
    """Returns ``layout`` over the finer axes of ``sizes``; each of its axes is a product of some of them."""
    finer: list[tuple[int, ...]] = []
    at = 0
    for n in layout.matrix:
        start = at
        while prod(sizes[start:at]) < n:
            at += 1
        finer.append(tuple(range(start, at)))
    dims = tuple(tuple(f for a in axes for f in finer[a]) for axes in layout.dims)
    return TensorLayout(sizes, dims, tuple(f for a in layout.partial for f in finer[a]))


Rows = tuple[tuple[int, ...], ...]
"""The groups of ranks of a collective: rows of equal length that together contain all ranks of a stage."""


@dataclass(frozen=True)
class ExchangedPiece:
    """A part of the tensor that ``receiver`` takes from ``sender``, which may be the same rank."""

    sender: int
    receiver: int
    box: Box

    @property
    def elements(self) -> int:
        return prod(self.box.shape)


def received(src: TensorLayout, dst: TensorLayout, shape: tuple[int, ...]) -> int:
    """Returns the largest number of elements of ``dst`` that a rank lacks.

    This is a lower bound for all redistributions.
    """
    pair = on_common_mesh(src, dst)
    if pair is not None:
        return lacking(shape, pair[0].matrix, pair[0].dims, pair[1].dims)
    needed, least = prod(dst.local_shape(shape)), prod(shape)
    for rank in range(src.ranks):
        both = src.box(shape, rank) & dst.box(shape, rank)
        if both is None:
            return needed
        least = min(least, prod(both.shape))
    return needed - least


def lacking(
    shape: tuple[int, ...],
    matrix: tuple[int, ...],
    src: tuple[tuple[int, ...], ...],
    dst: tuple[tuple[int, ...], ...],
) -> int:
    """Returns ``received`` for two layouts over one matrix, without a loop over its ranks."""
    needed, present = 1, 1
    for n, a, b in zip(shape, src, dst, strict=True):
        low, high = n // prod(matrix[x] for x in a), n // prod(matrix[x] for x in b)
        needed *= high
        shared = min(len(a), len(b))
        if a[:shared] != b[:shared]:
            present = 0  # the first slice by one axis and the last by another have nothing in common
        present *= min(low, high)
    return needed - present


@dataclass(frozen=True)
class Exchange:
    """An exchange of a tensor without terms of sums, which is the same within each of ``rows``.

    The layouts ``src`` and ``dst`` and the ``shape`` describe the part of the tensor that one row has, over
    the ranks of that row.
    """

    src: TensorLayout
    dst: TensorLayout
    shape: tuple[int, ...]
    rows: Rows

    @cached_property
    def pieces(self) -> tuple[ExchangedPiece, ...]:
        """All pieces, by receiver and then sender; ranks are places in a row.

        Each pair of sender and receiver has at most one piece. A receiver takes the elements that it has from
        itself. It takes others from the rank with its own coordinates on the axes over which ``src`` is
        repeated, so that an outer axis of nodes is not crossed. If that rank would send more than any rank
        receives, it takes them from the nearest rank that has them.
        """
        most = received(self.src, self.dst, self.shape)
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.src.ranks):
            holders.setdefault(_parts(self.src, rank), []).append(rank)
        sent = [0] * self.src.ranks
        pieces = []
        for to in range(self.src.ranks):
            own = _parts(self.src, to)
            replica = holders[own].index(to)
            for part, box in _overlaps(self.src, self.shape, self.dst.box(self.shape, to)):
                sender = to
                if part != own:
                    sender = _sender(to, holders[part], replica, prod(box.shape), sent, most)
                    sent[sender] += prod(box.shape)
                pieces.append(ExchangedPiece(sender, to, box))
        return tuple(sorted(pieces, key=lambda p: (p.receiver, p.sender)))

    def of(self, place: int) -> tuple[tuple[ExchangedPiece, ...], tuple[ExchangedPiece, ...]]:
        """Returns the pieces that the rank at ``place`` of a row sends, and those that it receives."""
        sends = tuple(p for p in self.pieces if p.sender == place)
        return sends, tuple(p for p in self.pieces if p.receiver == place)


def _sender(
    to: int, holders: list[int], replica: int, elements: int, sent: list[int], most: int
) -> int:  # fmt: skip
    preferred = holders[replica]
    if sent[preferred] + elements <= most:
        return preferred
    room = [r for r in holders if sent[r] + elements <= most]
    if room:
        return min(room, key=lambda r: (abs(r - to), r))
    return min(holders, key=lambda r: (sent[r], abs(r - to), r))


def _parts(layout: TensorLayout, rank: int) -> tuple[int, ...]:
    return tuple(layout.part(axes, rank) for axes in layout.dims)


def _overlaps(
    src: TensorLayout, shape: tuple[int, ...], target: Box
) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Yields the parts of ``src`` that overlap the box ``target``, and their overlaps."""
    sizes = src.local_shape(shape)
    if target.empty:
        return
    spans = [
        range(low // n, (high - 1) // n + 1) for low, high, n in zip(target.lo, target.hi, sizes, strict=True)
    ]
    for part in product(*spans):
        low = tuple(p * n for p, n in zip(part, sizes, strict=True))
        both = target & Box(low, tuple(a + n for a, n in zip(low, sizes, strict=True)))
        assert both is not None
        yield part, both


@lru_cache(maxsize=1 << 12)
def exchange(src: TensorLayout, dst: TensorLayout, shape: tuple[int, ...]) -> Exchange:
    """Plans the exchange from ``src`` to ``dst`` within rows of as few ranks as possible.

    Rows do not extend over an axis that both layouts repeat, or that leads the cuts of a dim in both.
    """
    pair = on_common_mesh(src, dst)
    a, b = pair if pair is not None else (src.canonical, dst.canonical)
    same = {span: x for x, span in enumerate(axis_spans(b.matrix))}
    twin = {x: same[span] for x, span in enumerate(axis_spans(a.matrix)) if span in same}

    # the axes that lead the cuts of a dim in both layouts, and those that cut neither layout
    apart = {x for x, y in twin.items() if x in a.repeated and y in b.repeated}
    for ours, theirs in zip(a.dims, b.dims, strict=True):
        for x, y in zip(ours, theirs, strict=False):
            if twin.get(x) != y:
                break
            apart.add(x)
    rows = _rows_over(a.matrix, tuple(x for x in range(len(a.matrix)) if x not in apart))
    smaller = tuple(
        n // prod(a.matrix[x] for x in axes if x in apart) for n, axes in zip(shape, a.dims, strict=True)
    )
    return Exchange(_without(a, apart), _without(b, {twin[x] for x in apart}), smaller, rows)


def _without(layout: TensorLayout, axes: set[int]) -> TensorLayout:
    """Returns ``layout`` without ``axes``: that of ranks which differ on the other axes only."""
    kept = [a for a in range(len(layout.matrix)) if a not in axes]
    new = {a: i for i, a in enumerate(kept)}
    dims = tuple(tuple(new[a] for a in cut if a in new) for cut in layout.dims)
    return TensorLayout(tuple(layout.matrix[a] for a in kept), dims)


@lru_cache(maxsize=1 << 12)
def rows_over(matrix: tuple[int, ...], axes: tuple[int, ...]) -> Rows:
    """Returns the rows of ranks that differ on ``axes`` only, ascending.

    There is one row for each place on the other axes.
    """
    return _rows_over(matrix, axes)


def _rows_over(matrix: tuple[int, ...], axes: tuple[int, ...]) -> Rows:
    steps = [range(0, span.end, span.stride) for span in axis_spans(matrix)]
    inner = [steps[a] for a in sorted(axes)]
    outer = [step for a, step in enumerate(steps) if a not in axes]
    row = [sum(at) for at in product(*inner)]
    return tuple(tuple(sum(at) + r for r in row) for at in product(*outer))
