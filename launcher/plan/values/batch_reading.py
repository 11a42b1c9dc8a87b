"""Who reads a batch from storage, and whom it is handed to."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.values.grid import Grid


@dataclass(frozen=True)
class BatchReading:
    """A batch is read in ``parts``; as many data-parallel ranks as share a part each keep their slice of it.

    ``over_stages``: one stage reads inputs and targets for all; else the first reads inputs and
    the last targets. ``over_operators``: one rank of a tensor-parallel group reads for all of it;
    else each reads for itself.
    """

    parts: int
    over_stages: bool
    over_operators: bool


@dataclass(frozen=True)
class BatchRole:
    """A rank's part in handing out a batch's inputs (or targets): reads, gives, takes from a rank, uses."""

    reads: bool
    gives: tuple[int, ...]
    takes: int | None
    uses: bool


def roles(how: BatchReading, grid: Grid, first: int, last: int, rank: int) -> tuple[BatchRole, BatchRole]:
    """What ``rank`` does with inputs, and with targets; pipeline ranks ``first`` and ``last`` use them."""
    inputs = _role(how, grid, source=first, user=first, rank=rank)
    targets = _role(how, grid, source=first if how.over_stages else last, user=last, rank=rank)
    return inputs, targets


def _role(how: BatchReading, grid: Grid, *, source: int, user: int, rank: int) -> BatchRole:
    """``source`` and ``user`` are pipeline ranks: where something is read, and where it is used."""
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
    """The rank of the pipeline rank ``source`` that reads what the rank ``user`` uses."""
    coords = {**grid.coords(user), "pp": source}
    if how.over_operators:
        coords["tp"] = 0
    return grid.rank(**coords)
