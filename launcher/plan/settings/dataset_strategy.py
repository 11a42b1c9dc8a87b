"""Who reads a batch from storage, and whom it is handed to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.partition.sizes import Sizes
from launcher.plan.settings.setting import Status
from launcher.plan.values.grid import Grid
from launcher.plan.values.text import many

KEY = "parallel.dataset_strategy"
Slices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Reading:
    """A batch is read in ``parts``; as many data-parallel ranks as share a part each keep their slice of it.

    ``over_stages``: one stage reads inputs and targets for all; else the first reads inputs and the last targets.
    ``over_operators``: one rank of a tensor-parallel group reads for all of it; else each reads for itself.
    """

    parts: int
    over_stages: bool
    over_operators: bool


@dataclass(frozen=True)
class Hand:
    """One rank's dealings with a batch's inputs (or targets): it reads, gives them to ranks, takes them, uses them."""

    reads: bool
    gives: tuple[int, ...]
    takes: int | None
    uses: bool


def reading(job: Job, sizes: Sizes, level: int) -> Reading:
    """``level`` is ``dataset_broadcast_opt_level``: 1 spares stages a reading, 2 tensor-parallel ranks, 3 both."""
    strategy, replicas = job.parallel.dataset_strategy, sizes.replicas
    parts = {"data_parallel": replicas, "full_batch": 1}[strategy] if isinstance(strategy, str) else strategy[0][0]
    return Reading(parts, level in (1, 3), level in (2, 3))


def hands(how: Reading, grid: Grid, first: int, last: int, rank: int) -> tuple[Hand, Hand]:
    """What ``rank`` does with inputs, and with targets; the pipeline ranks ``first`` and ``last`` use them."""
    return _hand(how, grid, first, first, rank), _hand(how, grid, first if how.over_stages else last, last, rank)


def _hand(how: Reading, grid: Grid, source: int, user: int, rank: int) -> Hand:
    """``source`` and ``user`` are pipeline ranks: where something is read, and where it is used."""
    users = [r for r in grid.peers(rank, "pp", "tp") if grid.coords(r)["pp"] == user]
    reader = {
        r: grid.rank(**grid.coords(r) | {"pp": source} | ({"tp": 0} if how.over_operators else {})) for r in users
    }
    reads = rank in reader.values()
    gives = tuple(r for r in users if reader[r] == rank and r != rank)
    uses = rank in users
    return Hand(reads, gives, reader[rank] if uses and not reads else None, uses)


def check(job: Job, sizes: Sizes | None) -> Iterator[Problem]:
    """Slices that this layout cannot hand out."""
    strategy = job.parallel.dataset_strategy
    if isinstance(strategy, str) or sizes is None:
        return
    if not strategy or not all(strategy):
        yield Problem(
            KEY,
            f"{written(strategy)}: should be a list a tensor, with a number of slices a dim",
        )
        return
    for i, dims in enumerate(strategy):
        for dim, n in enumerate(dims[1:], 1):
            if n > 1:
                text = f"{written(strategy)}: item [{i}][{dim}] = {n}: only dim 0, the samples, is handed out to ranks"
                text += "; what cuts a sequence cuts it inside the model (parallel.operators)"
                yield Problem(KEY, text, _pasted(tuple((d[0], *(1 for _ in d[1:])) for d in strategy)))
                return
    counts = sorted({dims[0] for dims in strategy})
    fits = [n for n in range(1, sizes.replicas + 1) if sizes.replicas % n == 0]
    if len(counts) > 1:
        text = f"{written(strategy)}: dim 0 is cut in {' and in '.join(map(str, counts))}"
        text += ": inputs and targets of a sample go together"
        yield Problem(KEY, text)
    elif counts[0] not in fits:
        text = f"{written(strategy)}: dim 0 is cut in {counts[0]}: does not divide the "
        text += f"{many(sizes.replicas, 'data-parallel rank')}; what does: {', '.join(map(str, fits))}"
        yield Problem(KEY, text, _pasted(_with(strategy, max(n for n in fits if n <= counts[0]))))


def unlike(strategy: Slices, dims: tuple[int, ...]) -> Problem | None:
    """Slices for another number of tensors, or of dims, than a batch has: its inputs, then its target."""
    if tuple(map(len, strategy)) == dims:
        return None
    have = ", ".join(f"input {i} has {many(n, 'dim')}" for i, n in enumerate(dims[:-1]))
    text = (
        f"{written(strategy)}: a batch has {many(len(dims), 'tensor')}: {have}, the target has {many(dims[-1], 'dim')}"
    )
    if len({slices[0] for slices in strategy}) > 1:
        return Problem(KEY, text)
    return Problem(KEY, text, _pasted(tuple((strategy[0][0], *(1 for _ in range(n - 1))) for n in dims)))


def _with(strategy: Slices, count: int) -> Slices:
    return tuple((count, *dims[1:]) for dims in strategy)


def _pasted(strategy: Slices) -> str:
    return quote(f"{KEY}={written(strategy)}")


def written(strategy: str | Slices) -> str:
    """
    >>> written(((8, 1), (8,)))
    '[[8,1],[8]]'
    """
    return strategy if isinstance(strategy, str) else str([list(dims) for dims in strategy]).replace(" ", "")


def fate(how: Reading, sizes: Sizes) -> tuple[Status, str]:
    """What a strategy other than ``data_parallel`` comes to."""
    if sizes.replicas == 1:
        return "satisfied", "one data-parallel rank reads every sample"
    if how.parts == sizes.replicas:
        return "applied", "each data-parallel rank reads its own part, as data_parallel"
    part = "the whole batch" if how.parts == 1 else f"one of {how.parts} parts"
    read, keep = sizes.global_batch // how.parts, sizes.local_batch
    return "applied", f"each data-parallel rank reads {part}, {many(read, 'sample')}, and keeps its slice of {keep}"
