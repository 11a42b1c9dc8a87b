"""All ranks of a stage in one process: each step of a redistribution changes a list of parts, by definition.

Collectives are computed from the full tensors of groups, without the code that ranks run.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.redistribution import Redistribution, Step

Parts = list[np.ndarray]


def region(layout: TensorLayout, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
    """Return the slices of a tensor that a rank holds, by the definition of a strided split: axis by axis."""
    at = np.unravel_index(rank, layout.matrix) if layout.matrix else ()
    out = []
    for n, axes in zip(shape, layout.dims, strict=True):
        low, size = 0, n
        for a in axes:
            size //= layout.matrix[a]
            low += int(at[a]) * size
        out.append(slice(low, low + size))
    return tuple(out)


def parts_of(whole: np.ndarray, layout: TensorLayout, seed: int = 0) -> Parts:
    """Return the part of each rank; terms of a sum are integers that add up to ``whole``."""
    rng = np.random.default_rng(seed)
    ways = [layout.matrix[a] for a in layout.partial]
    terms = [rng.integers(-9, 9, whole.shape).astype(whole.dtype) for _ in range(math.prod(ways) - 1)]
    terms.append(whole - sum(terms, np.zeros_like(whole)))
    out = []
    for rank in range(layout.ranks):
        at = np.unravel_index(rank, layout.matrix) if layout.matrix else ()
        term = int(np.ravel_multi_index([int(at[a]) for a in layout.partial], ways)) if ways else 0
        out.append(terms[term][region(layout, whole.shape, rank)].copy())
    return out


def carried_out(plan: Redistribution, parts: Parts) -> Parts:
    for step in plan.steps:
        parts = RUN[step.op](step, parts)
    return parts


def received_in(step: Step) -> list[int]:
    """Return the number of elements that each rank receives in an exchange."""
    out = [0] * step.before.ranks
    for row in step.rows:
        for piece in step.exchange.pieces:
            if piece.sender != piece.receiver:
                out[row[piece.receiver]] += math.prod(piece.box.shape)
    return out


def _slice(step: Step, parts: Parts) -> Parts:
    out = []
    for rank, part in enumerate(parts):
        had, kept = (region(layout, step.shape, rank) for layout in (step.before, step.after))
        out.append(part[tuple(slice(k.start - h.start, k.stop - h.start) for h, k in zip(had, kept, strict=True))])
    return out


def _members(step: Step, rank: int) -> list[int]:
    """Return the ranks that differ only on the axes of a step, in the order of those axes."""
    matrix = step.before.matrix
    at = [int(place) for place in np.unravel_index(rank, matrix)]
    found = []
    for places in itertools.product(*(range(matrix[a]) for a in step.axes)):
        for a, place in zip(step.axes, places, strict=True):
            at[a] = place
        found.append(int(np.ravel_multi_index(at, matrix)))
    assert any(set(row) == set(found) for row in step.rows)
    return found


def _all_reduce(step: Step, parts: Parts) -> Parts:
    return [sum((parts[r] for r in _members(step, rank)), np.zeros_like(part)) for rank, part in enumerate(parts)]


def _all_gather(step: Step, parts: Parts) -> Parts:
    return [np.concatenate([parts[r] for r in _members(step, rank)], step.dim) for rank in range(len(parts))]


def _reduce_scatter(step: Step, parts: Parts) -> Parts:
    out = []
    for rank, total in enumerate(_all_reduce(step, parts)):
        members = _members(step, rank)
        out.append(np.split(total, len(members), step.dim)[members.index(rank)])
    return out


def _all_to_all(step: Step, parts: Parts) -> Parts:
    """Gather the full tensor over the group, and split it again on the other dim."""
    out = []
    for rank, joined in enumerate(_all_gather(step, parts)):
        at = np.unravel_index(rank, step.before.matrix)
        ways = [step.before.matrix[a] for a in step.to_axes]
        place = int(np.ravel_multi_index([int(at[a]) for a in step.to_axes], ways))
        out.append(np.split(joined, math.prod(ways), step.to_dim)[place])
    return out


def _exchange(step: Step, parts: Parts) -> Parts:
    plan = step.exchange
    out = [np.full([s.stop - s.start for s in region(step.after, step.shape, r)], -1, parts[0].dtype)
           for r in range(len(parts))]  # fmt: skip
    filled = [np.zeros(part.shape, bool) for part in out]
    for row in step.rows:
        for piece in plan.pieces:
            had, wanted = (
                region(layout, plan.shape, place)
                for layout, place in ((plan.src, piece.sender), (plan.dst, piece.receiver))
            )
            source, target = (
                tuple(slice(a - b.start, c - b.start) for a, c, b in zip(piece.box.lo, piece.box.hi, base, strict=True))
                for base in (had, wanted)
            )
            assert not filled[row[piece.receiver]][target].any()
            filled[row[piece.receiver]][target] = True
            out[row[piece.receiver]][target] = parts[row[piece.sender]][source]
    assert all(done.all() for done in filled)
    return out


RUN = {
    "slice": _slice, "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all, "exchange": _exchange,
}  # fmt: skip
