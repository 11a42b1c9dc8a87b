"""Times collectives over groups, single messages, and gradients that are sent during a matrix product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from launcher.extras.calibration.constants import Overlap, TimedCollective, TimedMessage
from launcher.extras.calibration.kernels import LEAST_SECONDS, TimedWork, divisor
from launcher.runtime.cluster.world import World
from launcher.runtime.device import total_memory

CPU = (1 << 16, 1 << 20, 1 << 23)
GPU = (1 << 20, 1 << 24, 1 << 27)
"""Bytes of the full tensor."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
SEVERAL = 0.04
"""The least seconds of messages and of compared work, as the time that ranks wait for each other varies."""
TURNS = 0.03
"""The least seconds of collectives that each follow a computation, computations included."""
PARTS = 4
"""Tensors that are sent together."""
SMALL = 4
"""Groups of all sizes up to this are timed; of larger sizes, only this times a power of two."""

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Their names since torch 2.13, which warns about the earlier ones."""

Link = Literal["inside", "between"]


def timed_messages(world: World, device: torch.device, cores: int | None) -> Iterator[TimedWork]:
    """Yields samples of all links; ``cores``: those of a node, if ranks have no devices.

    All ranks must iterate, because groups are created on the way. On CPU cores each collective follows a
    computation, as in a step: the collective's threads are asleep then, and its tensors not in the caches.
    """
    by = 1 if device.type == "cpu" else divisor(total_memory(device))
    sizes = CPU if device.type == "cpu" else tuple(nbytes // by**2 for nbytes in GPU)
    before, least = (None, LEAST_SECONDS) if cores is None else (_product(device, by), TURNS)
    for link, ranks in groups(world):
        group = dist.new_group(list(ranks))
        here = world.rank in ranks
        for kind in KINDS:
            for nbytes in sizes:
                operation = TimedCollective(link, kind, nbytes, len(ranks))
                work = _collective(kind, nbytes, len(ranks), group, device) if here else _nothing
                yield TimedWork(operation, work, here, joint=True, before=before, least=least)
    for link, pair in _pairs(world):
        for nbytes in sizes:
            work = _message(nbytes, pair, world.rank, device)
            here = world.rank in pair
            yield TimedWork(TimedMessage(link, nbytes), work, here, joint=True, share=0.5, least=SEVERAL)
    yield from _overlap(world, cores, device, by)


def groups(world: World) -> list[tuple[Link, tuple[int, ...]]]:
    """Returns groups of the first ranks of the first node, and of the first rank of each node.

    >>> [ranks for _, ranks in groups(World(0, 8, 0, 4, 0, "cpu", "gloo"))]
    [(0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 4)]
    """
    firsts = range(0, world.size, world.local_size)
    inside: list[tuple[Link, tuple[int, ...]]] = [
        ("inside", tuple(range(n))) for n in _counts(world.local_size)
    ]
    return inside + [("between", tuple(firsts[:n])) for n in _counts(len(firsts))]


def _counts(most: int) -> list[int]:
    few = range(2, min(most, SMALL) + 1)
    more = (SMALL << n for n in range(1, most.bit_length()))
    return sorted({*few, *(n for n in more if n <= most), *([most] if most > 1 else [])})


def _pairs(world: World) -> Iterator[tuple[Link, tuple[int, int]]]:
    if world.local_size > 1:
        yield "inside", (0, 1)
    if world.size > world.local_size:
        yield "between", (0, world.local_size)


def _nothing() -> None:
    """Does nothing: the work of ranks outside a group."""


def _collective(
    kind: str, nbytes: int, ranks: int, group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[], object]:
    """Returns a collective, with the copies into and out of one flat tensor, as for gradients and weights."""
    count = nbytes // 4 // (ranks * PARTS) * ranks * PARTS
    full = list(torch.zeros(count, device=device).chunk(PARTS))
    own = list(torch.zeros(count // ranks, device=device).chunk(PARTS))

    def all_reduce() -> None:
        flat = torch.cat(full)
        dist.all_reduce(flat, group=group)
        _out(flat, full)

    def all_gather() -> None:
        flat = torch.empty(count, device=device)
        _gather(flat, torch.cat(own), group=group)
        _out(flat, full)

    def reduce_scatter() -> None:
        flat = torch.empty(count // ranks, device=device)
        _scatter(flat, torch.cat(full), group=group)
        _out(flat, own)

    return {"all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter}[kind]


def _out(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    for part, piece in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
        part.copy_(piece)


def _message(nbytes: int, pair: tuple[int, int], rank: int, device: torch.device) -> Callable[[], object]:
    """Returns a message to the other rank and one back."""
    if rank not in pair:
        return _nothing
    t = torch.zeros(nbytes // 4, device=device)
    first, other = rank == pair[0], pair[1] if rank == pair[0] else pair[0]

    def work() -> None:
        for sends in (first, not first):
            if sends:
                dist.send(t, other)
            else:
                dist.recv(t, other)

    return work


def _product(device: torch.device, by: int) -> Callable[[], object]:
    """Returns two matrix products; ``by``: the divisor of their sides, as returned by ``divisor``."""
    side = torch.randn((512 if device.type == "cpu" else 8192) // by, 1024 // by, device=device)
    return lambda: side @ side.t() @ side


def _overlap(world: World, cores: int | None, device: torch.device, by: int) -> Iterator[TimedWork]:
    """Yields a product, a shorter all-reduce, both at once, and one after the other.

    They are for ranks with a core each. ``by`` as in ``_product``.
    """
    count = min(world.local_size, cores or world.local_size)
    group = dist.new_group(list(range(max(2, count))))
    on_cpu = device.type == "cpu"
    flat = torch.zeros(((1 << 19) if on_cpu else (1 << 24)) // by**2, device=device)
    product = _product(device, by)

    def network() -> None:
        dist.all_reduce(flat, group=group)

    def both() -> None:
        sent = dist.all_reduce(flat, group=group, async_op=True)
        product()
        if sent is not None:
            sent.wait()

    def turns() -> None:
        product()
        network()

    one = TimedWork(Overlap("product"), product, world.rank < max(2, count), joint=True, least=SEVERAL)
    yield from (one, replace(one, timed=Overlap("network"), work=network))
    yield replace(one, timed=Overlap("both"), work=both)
    yield replace(one, timed=Overlap("turns"), work=turns)
