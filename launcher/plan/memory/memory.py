"""The bytes that each rank will hold: states exactly, activations as counted on meta tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from launcher.job.schema.components import Optim
from launcher.job.schema.job import Job
from launcher.job.schema.optim import SGD, Adafactor, Lion, Momentum, Muon, any_momentum
from launcher.plan.cut.param_groups import orthogonal
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.memory.walk import MemoryInUse
from launcher.plan.sizes import Sizes
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.layout import Layout
from launcher.plan.values.optimizer import OptimizerTraits


@dataclass(frozen=True)
class StateSize:
    """How much the optimizer keeps of each parameter.

    ``own`` describes the user's optimizer class. ``averaged``: a moving average of the weights is kept too.
    """

    optim: Optim
    own: OptimizerTraits | None = None
    averaged: bool = False

    @classmethod
    def from_job(cls, job: Job, own: OptimizerTraits | None = None) -> StateSize:
        return cls(job.optim, own, averaged=job.train.ema is not None)

    def copies(self, p: Placed) -> int | None:
        """Returns the number of tensors of the shape of ``p`` that the optimizer keeps for it.

        ``None`` stands for one row and one column.
        """
        match self.optim:
            case Adafactor():
                return None if len(p.spec.shape) > 1 else 1
            case Muon():
                return 1 if orthogonal(self.optim, p) else 2
            case _:
                return self._of_optimizer

    @property
    def of_matrix(self) -> int:
        """The number of tensors of its shape that are kept for a matrix."""
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
        """Returns the bytes of state for a part of ``p`` of this shape; 0 if ``p`` is not trained."""
        return state_bytes(shape, p.spec.dtype, self.copies(p), self.averaged) if p.trainable else 0


def state_bytes(shape: tuple[int, ...], dtype: str, copies: int | None, averaged: bool = False) -> int:
    """Returns the bytes of state for a part of a parameter of this shape; ``copies`` is as in ``StateSize``.

    >>> [state_bytes((3, 8), "float32", n) for n in (None, 1, 2)]
    [44, 96, 192]
    """
    numbers = prod(shape) * copies if copies is not None else prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
    return (numbers + averaged * prod(shape)) * ITEMSIZE[dtype]


@dataclass(frozen=True)
class Memory:
    """The bytes on one rank at the fullest moment of a step.

    ``optimizer`` includes a moving average of weights. ``grads`` are the gradients that exist at that moment,
    in the form in which they are kept. ``gathered`` are the full tensors that FSDP2 holds of sharded weights
    and their gradients, and half-precision copies of weights. ``activations`` is what forwards keep and what
    a backward needs in addition.
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
    params: tuple[Placed, ...], sizes: Sizes, state: StateSize, moments: tuple[MemoryInUse, ...]
) -> tuple[Memory, ...]:
    """Returns one row a rank, in the order of ranks.

    ``state``: what the optimizer keeps of each parameter; ``moments``: the fullest one of each pipeline rank.
    """
    out: list[Memory] = []
    kinds = [(p, (p.layout, p.spec.dtype, p.trainable, state.copies(p))) for p in params]
    for pp, at in enumerate(moments):
        here = sizes.stages_of(pp)
        mine = Counter(kind for p, kind in kinds for _ in p.copies(here))

        # ranks of a stage have different shards, and uneven shards have different sizes
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
    """Returns the bytes of the part of the tensor that ``rank`` has."""
    box = layout.box(rank)
    return 0 if box is None else prod(box.shape) * ITEMSIZE[dtype]
