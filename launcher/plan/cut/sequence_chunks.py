"""Where the sequence of a micro batch is cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt

from launcher.plan.tensor_parallel.module_strategies import tp_dim
from launcher.plan.tensor_parallel.sharded_operators import TensorParallelPlan
from launcher.plan.values.model_graph import Graph
from launcher.plan.values.tensor_spec import TensorSpec


@dataclass(frozen=True)
class SequencePieces:
    """The pieces of a sequence.

    ``lengths`` has the number of positions of each. ``graphs[q]`` is the graph in which the model runs piece
    q after the earlier pieces, whose state it reads. All graphs have the same nodes.
    """

    lengths: tuple[int, ...]
    graphs: tuple[Graph, ...]


def equal(length: int, count: int) -> tuple[int, ...]:
    """Returns the lengths of ``count`` pieces as equal as possible, the longer ones first.

    >>> equal(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(length // count + (n < length % count) for n in range(count))


def balanced(length: int, count: int, linear: float, quadratic: float) -> tuple[int, ...]:
    """Returns the lengths of ``count`` pieces that minimize the cost of the most expensive one.

    A piece from ``a`` to ``b`` costs linear (b - a) + quadratic (b - a) b. The last term is attention: each
    position reads all positions up to the end of its piece.

    >>> balanced(100, 4, 1.0, 0.0), balanced(100, 4, 1.0, 0.02)
    ((25, 25, 25, 25), (34, 26, 21, 19))
    """

    sequence = _Sequence(length, linear, quadratic)
    ends = [0]
    # the rest is balanced again after each piece, so that all later pieces share its rounding error
    for remaining in range(count, 0, -1):
        limit = sequence.limit(ends[-1], remaining)
        ends.append(sequence.ends(ends[-1], remaining, limit)[1])
    return tuple(b - a for a, b in pairwise(ends))


@dataclass(frozen=True)
class _Sequence:
    """A sequence; its positions from ``a`` to ``b`` cost linear (b - a) + quadratic (b - a) b."""

    length: int
    linear: float
    quadratic: float

    def limit(self, start: int, count: int) -> float:
        """Returns the minimum cost of the most expensive of ``count`` pieces from ``start`` on."""
        low, high = 0.0, (self.length - start) * (self.linear + self.quadratic * self.length)
        for _ in range(60):
            middle = (low + high) / 2
            enough = self.ends(start, count, middle)[-1] >= self.length
            low, high = (low, middle) if enough else (middle, high)
        return high

    def ends(self, start: int, count: int, limit: float) -> list[int]:
        """Returns ``start`` and the ends of ``count`` pieces if each takes as much as ``limit`` allows.

        Each takes at least one position and leaves one for each later piece.
        """
        ends = [start]
        for later in reversed(range(count)):
            step = self.linear + self.quadratic * ends[-1]
            most = 2 * limit / (step + sqrt(step * step + 4 * self.quadratic * limit))
            ends.append(max(ends[-1] + 1, min(ends[-1] + int(most * (1 + 1e-12)), self.length - later)))
        return ends


def grain(flow: TensorParallelPlan, tp: int) -> int:
    """Returns the number that must divide every length.

    If an operator cuts the sequence over ``tp``, each rank has a part of each piece.
    """
    operators = [s.operator for s in flow.spreads]
    kinds_and_axes = ((o.kind, axes) for o in operators for axes in (o.input, o.output) if axes)
    cut = any(
        tp_dim(a) == 1 and (len(a) > 2 or kind in ("embedding", "module")) for kind, a in kinds_and_axes
    )
    return tp if cut else 1


def shortened(spec: TensorSpec, length: int, full_length: int) -> TensorSpec:
    """Returns ``spec`` for ``length`` of ``full_length`` positions.

    Dim 1 is the sequence, or a rank's part of it.
    """
    return replace(spec, shape=(spec.shape[0], spec.shape[1] * length // full_length, *spec.shape[2:]))
