"""The bytes of optimizer state per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from launcher.job.schema.components import Optim
from launcher.job.schema.job import Job
from launcher.job.schema.optim import SGD, Adafactor, Lion, Momentum, Muon, any_momentum
from launcher.plan.cut.param_groups import orthogonal
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.values.dtypes import ITEMSIZE
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

        ``None`` means one row and one column.
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
