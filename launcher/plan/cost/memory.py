"""Bytes each rank will hold: states exactly, activations as counted on meta tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from launcher.job.schema.components import Optim
from launcher.job.schema.job import Job
from launcher.job.schema.optimizers import SGD, Lion, Momentum, any_momentum
from launcher.plan.cost.peak import Moment
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Sizes
from launcher.plan.values.facts import ITEMSIZE
from launcher.plan.values.layout import Layout
from launcher.plan.values.optimizer_traits import OptimizerTraits


def copies(job: Job, own: OptimizerTraits | None = None) -> int:
    """Tensors that are kept for each parameter, of its shape: the optimizer's, and a moving average.

    ``own``: what was seen of a class of the user's own.
    """
    return (0 if job.train.ema is None else 1) + _of_optimizer(job.optim, own)


def _of_optimizer(optim: Optim, own: OptimizerTraits | None) -> int:
    if own is not None:
        return own.copies
    match optim:
        case SGD() | Momentum():
            return 1 if any_momentum(optim) else 0
        case Lion():
            return 1
        case _:
            return 2


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
    params: tuple[Placed, ...], sizes: Sizes, copies: int, moments: tuple[Moment, ...]
) -> tuple[Memory, ...]:
    """One row a rank.

    ``copies``: optimizer tensors a parameter; ``moments``: the fullest one of each pipeline rank.
    """
    out: list[Memory] = []
    for pp, at in enumerate(moments):
        here = sizes.held(pp)
        mine = Counter((p.layout, p.spec.dtype, p.trainable) for p in params for _ in p.copies(here))

        # ranks of a stage differ in their shards; uneven ones need not be alike
        axes = sorted({axis for layout, _, _ in mine if not layout.even for axis in layout.axes})
        for ranks in sizes.grid.alike(*axes, pp=pp):
            held = [
                (trainable, n * local_bytes(layout, dtype, ranks[0]))
                for (layout, dtype, trainable), n in mine.items()
            ]
            trained = sum(n for trainable, n in held if trainable)
            all_of_it = sum(n for _, n in held)
            row = Memory(
                rank=ranks[0],
                params=all_of_it,
                grads=at.grads,
                optimizer=copies * trained,
                gathered=at.gathered,
                activations=at.activations,
            )
            out += [replace(row, rank=rank) for rank in ranks]
    return tuple(sorted(out, key=lambda m: m.rank))


def local_bytes(layout: Layout, dtype: str, rank: int) -> int:
    """Of the part that ``rank`` has."""
    box = layout.box(rank)
    return 0 if box is None else prod(box.shape) * ITEMSIZE[dtype]
