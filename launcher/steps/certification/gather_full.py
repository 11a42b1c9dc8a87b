"""Assembles full tensors from the shards of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.parallel.local import grad, local
from launcher.parallel.parallel_model import ParallelModel
from launcher.plan.partition.params import Placed
from launcher.plan.plan import Plan
from launcher.plan.values.layout import Box
from launcher.runtime.cluster.value_collectives import gather, gather_tensors

AT_ONCE = 64 << 20
UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})


@dataclass(frozen=True)
class Piece:
    """The shard of the tensor ``name`` on ``rank``; a second copy of a tied tensor is a second piece."""

    name: str
    rank: int
    box: Box
    value: Tensor


@dataclass(frozen=True)
class Whole:
    """Full tensors by first name; ``complaints``: copies that are not bit-equal, missing elements."""

    tensors: dict[str, Tensor]
    complaints: tuple[str, ...]


def pieces(par: ParallelModel, weights: bool = False) -> list[Piece]:
    """All gradients (or weights) and buffers of this rank, including copies, on the CPU."""
    out = []
    for part in par.parts:
        for p, _, t in part.named(par.plan.params):
            value, box = (local(t) if p.buffer or weights else grad(t)), p.layout.box(par.meshes.rank)
            if value is not None:
                assert box is not None
                out.append(
                    Piece(p.name, par.meshes.rank, box, _portable(value.detach()).to("cpu", copy=True))
                )
    return out


def _portable(t: Tensor) -> Tensor:
    """Widens dtypes that torch cannot compare: 8-bit floats and wide unsigned integers."""
    if t.dtype in UNSIGNED:
        return t.long()
    if t.is_floating_point() and t.itemsize == 1:
        return t.float()
    return t


def whole(plan: Plan, found: Sequence[Piece]) -> Whole:
    """The full tensors made of ``found``, the pieces of all ranks; omits tensors without any piece."""
    by_name: dict[str, list[Piece]] = {}
    for f in found:
        by_name.setdefault(f.name, []).append(f)
    full, complaints = {}, list[str]()
    for p in plan.params:
        if p.name in by_name:
            full[p.name], wrong = _joined(p, by_name[p.name])
            complaints += wrong
    return Whole(full, tuple(complaints))


def _joined(p: Placed, found: list[Piece]) -> tuple[Tensor, list[str]]:
    full = torch.full(p.spec.shape, -1).to(found[0].value.dtype)
    first: dict[Box, Piece] = {}
    wrong = []
    for f in found:
        other = first.setdefault(f.box, f)
        if not torch.equal(other.value, f.value):
            wrong.append(f"{p.name}: copies differ on ranks {other.rank} and {f.rank}")
        full[tuple(slice(a, b) for a, b in zip(f.box.lo, f.box.hi, strict=True))] = f.value
    if gaps := [ranks for box, ranks in p.layout.holders().items() if box not in first]:
        wrong.append(f"{p.name}: not every piece is there, none of rank {gaps[0][0]}")
    return full, wrong


def gathered(plan: Plan, mine: Sequence[Piece]) -> Whole | None:
    """On rank 0 the full tensors of all ranks' pieces, on the others ``None``. Every rank calls this."""
    full, complaints = dict[str, Tensor](), list[str]()
    for names in _batches(plan):
        every = _gathered([f for f in mine if f.name in names])
        if every is not None:
            got = whole(plan, every)
            full |= got.tensors
            complaints += got.complaints
    return Whole(full, tuple(complaints)) if dist.get_rank() == 0 else None


def _gathered(mine: Sequence[Piece]) -> list[Piece] | None:
    """On rank 0 the pieces of all ranks: one collective sends their labels, another their values."""
    labels = gather([(f.name, f.rank, f.box) for f in mine], list[tuple[str, int, Box]])
    values = gather_tensors({str(n): f.value for n, f in enumerate(mine)})
    if labels is None or values is None:
        return None
    pairs = zip(labels, values, strict=True)
    return [
        Piece(name, rank, box, numbers[str(n)])
        for one, numbers in pairs
        for n, (name, rank, box) in enumerate(one)
    ]


def _batches(plan: Plan) -> Iterator[frozenset[str]]:
    """Names of a few tensors at a time, which limits what rank 0 receives at once."""
    names, total = set[str](), 0
    for p in plan.params:
        if names and total + p.spec.nbytes > AT_ONCE:
            yield frozenset(names)
            names, total = set[str](), 0
        names.add(p.name)
        total += p.spec.nbytes
    if names:
        yield frozenset(names)


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def error(a: Tensor, b: Tensor, rounding: float = 0.0) -> float:
    """The largest difference, relative to the largest value of ``b`` or to ``rounding``, if larger."""
    a, b = _real(a).double(), _real(b).double()
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    worst = (a - b).abs().max().item()
    size = max(b.abs().max().item(), rounding)
    if size:
        return worst / size
    return 0.0 if worst == 0 else float("inf")
