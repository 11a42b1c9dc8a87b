"""Bytes each rank will hold: states exactly, activations as counted on meta tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from launcher.job.models import SGD, Momentum, Optim
from launcher.job.parallel import Hsdp
from launcher.plan.facts import ITEMSIZE
from launcher.plan.fusion import Group
from launcher.plan.params import Placed
from launcher.plan.sizes import Sizes


def copies(optim: Optim) -> int:
    """Tensors that the optimizer keeps for each parameter, of its shape; of a class of one's own, two are assumed."""
    match optim:
        case SGD(momentum=momentum) | Momentum(momentum=momentum):
            return 1 if momentum else 0
        case _:
            return 2


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. ``gathered`` is what FSDP2 holds whole of sharded weights and their gradients."""

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
    params: tuple[Placed, ...],
    groups: tuple[Group, ...],
    sizes: Sizes,
    hsdp: Hsdp | None,
    copies: int,
    activations: tuple[int, ...],
) -> tuple[Memory, ...]:
    """One row a rank. ``copies``: optimizer tensors a parameter; ``activations``: peak bytes of each pipeline rank."""
    out = []
    for pp in range(sizes.grid["pp"]):
        here = sizes.held(pp)
        mine = [p for p in params for _ in p.copies(here)]
        gathered = _gathered([g.nbytes for g in groups if g.stage in here], hsdp)
        for rank in sizes.grid.ranks(pp=pp):
            held = [(p.trainable, _local(p, rank)) for p in mine]
            trained = sum(n for trainable, n in held if trainable)
            all_of_it = sum(n for _, n in held)
            out.append(Memory(rank, all_of_it, trained, copies * trained, gathered, activations[pp]))
    return tuple(sorted(out, key=lambda m: m.rank))


def _gathered(whole: list[int], hsdp: Hsdp | None) -> int:
    """Of groups with these bytes. Gradients of level1 stay whole until the last micro batch."""
    most = max(whole, default=0)
    if hsdp is not None and hsdp.optimizer_level == "level1":
        return 2 * sum(whole)
    if hsdp is not None and hsdp.optimizer_level == "level2":
        return sum(whole) + most  # one group's gradients until they are scattered
    return 3 * most  # one in use, the next being gathered, the gradients of one


def _local(p: Placed, rank: int) -> int:
    box = p.layout.box(rank)
    return 0 if box is None else prod(box.shape) * ITEMSIZE[p.spec.dtype]


def bytes_text(n: float) -> str:
    """Bytes for people.

    >>> bytes_text(1536), bytes_text(3 * 1024**3)
    ('1.5 KB', '3.0 GB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TB"
