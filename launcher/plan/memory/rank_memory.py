"""The bytes that each rank holds: exact for states, counted on meta tensors for activations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.memory.optimizer_state import StateSize, state_bytes
from launcher.plan.memory.walk import MemoryInUse
from launcher.plan.sizes import Sizes
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.layout import Layout


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
    """Returns one row per rank, in the order of ranks.

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
