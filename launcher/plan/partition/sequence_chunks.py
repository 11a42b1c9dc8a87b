"""Where the sequence of a micro batch is cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt

from launcher.plan.operators.resolve import Flow, tp_dim
from launcher.plan.values.facts import Graph, TensorSpec


@dataclass(frozen=True)
class Pieces:
    """``graphs[q]``: how the model runs piece q, with what earlier ones left; all have the same nodes."""

    lengths: tuple[int, ...]
    graphs: tuple[Graph, ...]


def equal(length: int, count: int) -> tuple[int, ...]:
    """Pieces as equal as they can be, the longer ones first.

    >>> equal(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(length // count + (n < length % count) for n in range(count))


def balanced(length: int, count: int, linear: float, quadratic: float) -> tuple[int, ...]:
    """Pieces whose dearest costs least; from ``a`` to ``b``: linear (b - a) + quadratic (b - a) b.

    The last term is attention: each position reads all positions up to the end of its piece.

    >>> balanced(100, 4, 1.0, 0.0), balanced(100, 4, 1.0, 0.02)
    ((25, 25, 25, 25), (34, 26, 21, 19))
    """

    whole = _Sequence(length, linear, quadratic)
    ends = [0]
    # the rest is cut anew each time: what one piece cannot take, all others share
    for left in range(count, 0, -1):
        limit = whole.limit(ends[-1], left)
        ends.append(whole.ends(ends[-1], left, limit)[1])
    return tuple(b - a for a, b in pairwise(ends))


@dataclass(frozen=True)
class _Sequence:
    """``length`` positions; from ``a`` to ``b`` they cost linear (b - a) + quadratic (b - a) b."""

    length: int
    linear: float
    quadratic: float

    def limit(self, start: int, count: int) -> float:
        """The least that the dearest of ``count`` pieces from ``start`` on can cost."""
        low, high = 0.0, (self.length - start) * (self.linear + self.quadratic * self.length)
        for _ in range(60):
            middle = (low + high) / 2
            enough = self.ends(start, count, middle)[-1] >= self.length
            low, high = (low, middle) if enough else (middle, high)
        return high

    def ends(self, start: int, count: int, limit: float) -> list[int]:
        """Where pieces end when each takes what it can below ``limit``.

        One position at least, and one is left for each later piece.
        """
        ends = [start]
        for later in reversed(range(count)):
            step = self.linear + self.quadratic * ends[-1]
            most = 2 * limit / (step + sqrt(step * step + 4 * self.quadratic * limit))
            ends.append(max(ends[-1] + 1, min(ends[-1] + int(most * (1 + 1e-12)), self.length - later)))
        return ends


def grain(flow: Flow, tp: int) -> int:
    """What every length is a multiple of.

    Where an operator cuts the sequence, each rank has its part of each piece.
    """
    operators = [s.operator for s in flow.spreads]
    said = ((o.kind, axes) for o in operators for axes in (o.input, o.output) if axes)
    cut = any(tp_dim(a) == 1 and (len(a) > 2 or kind in ("embedding", "module")) for kind, a in said)
    return tp if cut else 1


def shortened(spec: TensorSpec, length: int, whole: int) -> TensorSpec:
    """``spec`` for ``length`` of ``whole`` positions: dim 1 is the sequence's, or a rank's part of it."""
    return replace(spec, shape=(spec.shape[0], spec.shape[1] * length // whole, *spec.shape[2:]))
