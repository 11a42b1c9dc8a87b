"""Bytes each rank will hold: states exactly, activations as counted on meta tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from launcher.job.schema.components import SGD, Momentum, Optim
from launcher.plan.cost.peak import Moment
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Sizes
from launcher.plan.values.facts import ITEMSIZE
from launcher.plan.values.optimizer_traits import OptimizerTraits


def copies(optim: Optim, own: OptimizerTraits | None = None) -> int:
    """Tensors that the optimizer keeps for each parameter, of its shape.

    ``own``: what was seen of a class of the user's own.
    """
    if own is not None:
        return own.copies
    match optim:
        case SGD(momentum=momentum) | Momentum(momentum=momentum):
            return 1 if momentum else 0
        case _:
            return 2


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the fullest moment of a step.

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
    out = []
    for pp, at in enumerate(moments):
        here = sizes.held(pp)
        mine = [p for p in params for _ in p.copies(here)]

        # ranks of a stage differ in their shards; uneven ones need not be alike
        for rank in sizes.grid.ranks(pp=pp):
            held = [(p.trainable, _local(p, rank)) for p in mine]
            trained = sum(n for trainable, n in held if trainable)
            all_of_it = sum(n for _, n in held)
            out.append(
                Memory(
                    rank=rank,
                    params=all_of_it,
                    grads=at.grads,
                    optimizer=copies * trained,
                    gathered=at.gathered,
                    activations=at.activations,
                )
            )
    return tuple(sorted(out, key=lambda m: m.rank))


def _local(p: Placed, rank: int) -> int:
    box = p.layout.box(rank)
    return 0 if box is None else prod(box.shape) * ITEMSIZE[p.spec.dtype]
