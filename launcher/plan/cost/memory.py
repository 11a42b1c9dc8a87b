"""Bytes each rank will hold: states exactly, activations as counted on meta tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from launcher.job.schema.components import Optim
from launcher.job.schema.job import Job
from launcher.job.schema.optimizers import SGD, Adafactor, Lion, Momentum, Muon, any_momentum
from launcher.plan.cost.peak import Moment
from launcher.plan.partition.param_groups import orthogonal
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Sizes
from launcher.plan.values.facts import ITEMSIZE
from launcher.plan.values.layout import Layout
from launcher.plan.values.optimizer_traits import OptimizerTraits


@dataclass(frozen=True)
class StateSize:
    """How much is kept of each parameter.

    ``own``: what was seen of an optimizer of the user's own; ``averaged``: a moving average of weights too.
    """

    optim: Optim
    own: OptimizerTraits | None = None
    averaged: bool = False

    @classmethod
    def of(cls, job: Job, own: OptimizerTraits | None = None) -> StateSize:
        return cls(job.optim, own, averaged=job.train.ema is not None)

    def copies(self, p: Placed) -> int | None:
        """Tensors that the optimizer keeps for ``p``, of its shape; ``None``: a row and a column."""
        match self.optim:
            case Adafactor():
                return None if len(p.spec.shape) > 1 else 1
            case Muon():
                return 1 if orthogonal(self.optim, p) else 2
            case _:
                return self._of_optimizer

    @property
    def of_matrix(self) -> int:
        """Tensors that are kept for a matrix, of its shape."""
        return self._of_optimizer + self.averaged

    @property
    def _of_optimizer(self) -> int:
        if self.own is not None:
            return self.own.copies
        match self.optim:
            case SGD() | Momentum():
                return 1 if any_momentum(self.optim) else 0
            case Lion() | Muon():
                return 1
            case Adafactor():
                return 0
            case _:
                return 2

    def nbytes(self, p: Placed, shape: tuple[int, ...]) -> int:
        """Of what is kept for a part of ``p`` of that shape; 0 where that is not trained."""
        return state_bytes(shape, p.spec.dtype, self.copies(p), self.averaged) if p.trainable else 0


def state_bytes(shape: tuple[int, ...], dtype: str, copies: int | None, averaged: bool = False) -> int:
    """Of what is kept for a part of a parameter of that shape; ``copies`` as in ``StateSize``.

    >>> [state_bytes((3, 8), "float32", n) for n in (None, 1, 2)]
    [44, 96, 192]
    """
    numbers = prod(shape) * copies if copies is not None else prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
    return (numbers + averaged * prod(shape)) * ITEMSIZE[dtype]


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the fullest moment of a step; ``optimizer`` has a moving average of weights too.

    ``grads`` are those there by then, as they are kept; ``gathered`` what FSDP2 holds whole of sharded
    weights and of their gradients, and weights in half precision; ``activations`` what a forward keeps and
    a backward needs besides.
    """

    rank: int
    params: int
    grads: int
    optimizer: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer + self.gathered + self.activations


def memory(
    params: tuple[Placed, ...], sizes: Sizes, state: StateSize, moments: tuple[Moment, ...]
) -> tuple[Memory, ...]:
    """One row a rank.

    ``state``: what is kept of each; ``moments``: the fullest one of each pipeline rank.
    """
    out: list[Memory] = []
    kinds = [(p, (p.layout, p.spec.dtype, p.trainable, state.copies(p))) for p in params]
    for pp, at in enumerate(moments):
        here = sizes.held(pp)
        mine = Counter(kind for p, kind in kinds for _ in p.copies(here))

        # ranks of a stage differ in their shards; uneven ones need not be alike
        axes = sorted({axis for layout, *_ in mine if not layout.even for axis in layout.axes})
        for ranks in sizes.grid.alike(*axes, pp=pp):
            all_of_it = optimizer = 0
            for (layout, dtype, trainable, copies), n in mine.items():
                all_of_it += n * local_bytes(layout, dtype, ranks[0])
                box = layout.box(ranks[0])
                if trainable and box is not None:
                    optimizer += n * state_bytes(box.shape, dtype, copies, state.averaged)
            row = Memory(
                rank=ranks[0],
                params=all_of_it,
                grads=at.grads,
                optimizer=optimizer,
                gathered=at.gathered,
                activations=at.activations,
            )
            out += [replace(row, rank=rank) for rank in ranks]
    return tuple(sorted(out, key=lambda m: m.rank))


def local_bytes(layout: Layout, dtype: str, rank: int) -> int:
    """Of the part that ``rank`` has."""
    box = layout.box(rank)
    return 0 if box is None else prod(box.shape) * ITEMSIZE[dtype]
