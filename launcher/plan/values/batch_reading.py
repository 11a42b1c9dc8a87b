"""Which ranks read a batch from storage, and which ranks they send it to."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.values.grid import Grid


@dataclass(frozen=True)
class BatchReading:
    """A batch is read in ``parts`` parts; each of the data-parallel ranks that share a part keeps its slice.

    ``over_stages``: the first stage reads both inputs and targets; otherwise it reads the inputs and the
    last stage the targets. ``over_operators``: one rank of a tensor-parallel group reads for the group;
    otherwise each rank reads for itself.
    """

    parts: int
    over_stages: bool
    over_operators: bool


@dataclass(frozen=True)
class BatchRole:
    """What one rank does with the inputs (or targets) of a batch.

    ``reads``: whether it reads them from storage. ``gives``: the ranks that it sends them to. ``takes``: the
    rank that it receives them from, if any. ``uses``: whether it computes with them.
    """

    reads: bool
    gives: tuple[int, ...]
    takes: int | None
    uses: bool


def roles(how: BatchReading, grid: Grid, first: int, last: int, rank: int) -> tuple[BatchRole, BatchRole]:
    """Returns the role of ``rank`` for inputs, and its role for targets.

    ``first`` and ``last`` are the pipeline ranks that use the inputs and the targets.
    """
    inputs = _role(how, grid, source=first, user=first, rank=rank)
    targets = _role(how, grid, source=first if how.over_stages else last, user=last, rank=rank)
    return inputs, targets


def _role(how: BatchReading, grid: Grid, *, source: int, user: int, rank: int) -> BatchRole:
    """Returns one role of ``rank``; data are read on pipeline rank ``source`` and used on ``user``."""
    users = [r for r in grid.peers(rank, "pp", "tp") if grid.coords(r)["pp"] == user]
    reader = {r: _reader(how, grid, source, r) for r in users}
    reads = rank in reader.values()
    uses = rank in users
    return BatchRole(
        reads=reads,
        gives=tuple(r for r in users if reader[r] == rank and r != rank),
        takes=reader[rank] if uses and not reads else None,
        uses=uses,
    )


def _reader(how: BatchReading, grid: Grid, source: int, user: int) -> int:
    """The rank at pipeline rank ``source`` that reads what the rank ``user`` uses."""
    coords = {**grid.coords(user), "pp": source}
    if how.over_operators:
        coords["tp"] = 0
    return grid.rank(**coords)
