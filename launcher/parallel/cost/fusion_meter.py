"""Counts the memory traffic between a module's operations that a compiler saves by fusing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from launcher.parallel.cost.kernels import FLASH, FLASH_BACKWARD, FREE, PRODUCTS, operations_of
from launcher.parallel.dispatch.containers import tensors
from launcher.plan.values.operations import Operations

aten = torch.ops.aten
BARRIERS = frozenset({*PRODUCTS, FLASH, FLASH_BACKWARD, aten.convolution, aten.convolution_backward})
"""Library kernels, whose inputs and outputs are in memory."""
JOINED = frozenset({
    aten._to_copy, aten.copy, aten.copy_, aten.clone, aten.cat, aten.stack, aten.arange, aten.zeros,
    aten.ones, aten.zeros_like, aten.ones_like, aten.full, aten.full_like, aten.new_zeros, aten.new_ones,
    aten.fill_,
    aten.sum, aten.mean, aten.amax, aten.amin, aten.var_mean, aten.var, aten._softmax, aten._log_softmax,
    aten._softmax_backward_data, aten._log_softmax_backward_data, aten.native_layer_norm,
    aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
    aten.select_backward, aten.slice_backward, aten.tril, aten.triu, aten.embedding,
})  # fmt: skip
"""Operations that a compiler fuses with their neighbors, besides pointwise ones."""
OWN = ("library", "other")
"""Kinds of operations that are not fused."""


@dataclass(frozen=True)
class _Operation:
    """One operation; ``reads`` and ``makes`` map the number of a storage to bytes.

    ``kind`` is "library", "joined", "other", or "free" for an operation that runs nothing.
    """

    kind: str
    reads: dict[int, int]
    makes: dict[int, int]
    moved: int


class FusionMeter:
    """The operations of a module, in order."""

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._numbers: dict[int, int] = {}
        self._count = 0
        self._seen: list[_Operation] = []
        self._kept: dict[int, int] = {}
        self._own = {self._number(t) for t in own}

    def _new(self, t: torch.Tensor) -> int:
        """Numbers a new storage, whose address may have belonged to a freed one."""
        self._count += 1
        self._numbers[t.untyped_storage()._cdata] = self._count
        return self._count

    def _number(self, t: torch.Tensor) -> int:
        number = self._numbers.get(t.untyped_storage()._cdata)
        return self._new(t) if number is None else number

    def mark(self) -> int:
        return len(self._seen)

    def keep(self, t: torch.Tensor) -> torch.Tensor:
        """Notes that ``t`` is saved for the backward."""
        self._kept[self._number(t)] = t.untyped_storage().nbytes()
        return t

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Notes one operation and what it returned."""
        inputs = list(tensors((args, kwargs)))
        reads = {self._number(t): _nbytes(t) for t in inputs}
        known = {t.untyped_storage()._cdata for t in inputs}
        made = list(tensors((out,)))
        makes = {
            self._number(t) if t.untyped_storage()._cdata in known else self._new(t): _nbytes(t) for t in made
        }
        cost = operations_of(func, args, kwargs, out)
        if cost is not None:
            self._seen.append(_Operation(_kind(func), reads, makes, cost.moved))

    def spared(self, start: int, end: int | None = None) -> Operations:
        """Returns the bytes and kernels between two marks that a compiler saves by fusing operations."""
        operations = self._seen[start:end]
        still_moved = sum(_run(*run) for run in _runs(operations)) + sum(
            o.moved for o in operations if o.kind == "other"
        )
        kernels = sum(o.kind in OWN for o in operations) + sum(1 for _ in _runs(operations))
        moved = sum(o.moved for o in operations)
        return Operations(moved=max(0, moved - still_moved), kernels=max(0, len(operations) - kernels))

    def made_again(self, end: int, out: Iterable[torch.Tensor]) -> int:
        """Returns the bytes saved by the forward, up to ``end``, that a compiled backward recomputes instead.

        These are results of fused operations. No library kernel reads them, and other saved tensors suffice
        to compute them.
        """
        operations = self._seen[:end]
        makers = {n: o for o in reversed(operations) for n in o.makes.keys() - o.reads.keys()}
        taken = {n for o in operations if o.kind in OWN for n in o.reads}
        stays = taken | {self._number(t) for t in out}

        def droppable(n: int) -> bool:
            return n in makers and makers[n].kind == "joined" and n not in stays

        there = self._own | {n for n in self._kept if not droppable(n)}
        return sum(b for n, b in self._kept.items() if droppable(n) and _follows(n, makers, there, droppable))


def _follows(
    n: int, makers: dict[int, _Operation], there: set[int], droppable: Callable[[int], bool]
) -> bool:
    """Returns true if fused operations compute storage ``n`` from those in ``there``."""
    todo, done = [*makers[n].reads], {n}
    while todo:
        m = todo.pop()
        if m in there or m in done:
            continue
        if m not in makers or makers[m].kind != "joined":
            return False
        done.add(m)
        todo += makers[m].reads
    return True


Run = tuple[list[_Operation], Sequence[_Operation]]


def _runs(operations: Sequence[_Operation]) -> Iterator[Run]:
    """Yields each run of fused operations between two others, with all operations."""
    run: list[_Operation] = []
    for o in (*operations, None):
        if o is not None and o.kind == "joined":
            run.append(o)
        elif run and (o is None or o.kind in OWN):
            yield run, operations
            run = []


def _run(run: list[_Operation], operations: Sequence[_Operation]) -> int:
    """Returns the bytes that a run moves.

    Each tensor from outside is read once. A result is written once if an operation outside reads it, or if
    none inside does.
    """
    mine = {id(o) for o in run}
    made = {n: b for o in run for n, b in o.makes.items()}
    read = {n: b for o in run for n, b in o.reads.items() if n not in made}
    inside = {n for o in run for n in o.reads}
    outside = {n for o in operations if id(o) not in mine and o.kind != "free" for n in o.reads}
    return sum(read.values()) + sum(b for n, b in made.items() if n in outside or n not in inside)


def _kind(func: Any) -> str:
    packet = func._overloadpacket
    if packet in BARRIERS:
        return "library"
    if packet is aten._unsafe_view:
        return "free"
    joined = torch.Tag.pointwise in func.tags or packet in JOINED or packet in FREE
    return "joined" if joined else "other"


def _nbytes(t: torch.Tensor) -> int:
    """Returns the bytes that one read of ``t`` moves: at most those of its storage, if ``t`` is expanded."""
    return min(t.numel() * t.dtype.itemsize, t.untyped_storage().nbytes())
