"""``parallel.dataset_strategy``: which rank reads which part of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote
from typing import Any

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.resolve import transformer_opt
from launcher.plan.sizes import Sizes
from launcher.plan.values.grid import Grid
from launcher.plan.values.setting import Outcome, Setting
from launcher.plan.values.text import many


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
    """Returns the rank at pipeline rank ``source`` that reads what the rank ``user`` uses."""
    coords = {**grid.coords(user), "pp": source}
    if how.over_operators:
        coords["tp"] = 0
    return grid.rank(**coords)


KEY = "parallel.dataset_strategy"
Slices = tuple[tuple[int, ...], ...]


def problems(job: Job, sizes: Sizes | None) -> Iterator[Problem]:
    """Yields a problem if the slices are malformed or do not fit the data-parallel ranks."""
    strategy = job.parallel.dataset_strategy
    if isinstance(strategy, str):
        return
    if not formed(strategy):
        yield Problem(KEY, f"{written(strategy)}: should be {_form(strategy)}")
        return
    if isinstance(strategy, dict) or sizes is None or sizes.engine.over_matrices:
        return

    # all tensors cut dim 0 (the samples) into one number of slices, a divisor of the number of ranks
    counts = sorted({dims[0] for dims in strategy})
    fits = [n for n in range(1, sizes.replicas + 1) if sizes.replicas % n == 0]
    if len(counts) > 1:
        text = f"{written(strategy)}: dim 0 is cut into {' and into '.join(map(str, counts))} slices"
        text += ", but inputs and targets of a sample must stay together"
        yield Problem(KEY, text)
    elif counts[0] not in fits:
        text = f"{written(strategy)}: dim 0 is cut into {counts[0]} slices, but their number must divide the "
        text += f"{many(sizes.replicas, 'data-parallel rank')}; use one of {', '.join(map(str, fits))}"
        fewer = max(n for n in fits if n <= counts[0])
        yield Problem(KEY, text, _pasted(tuple((fewer, *dims[1:]) for dims in strategy)))


def formed(strategy: Slices | dict[str, Any]) -> bool:
    """Returns true if ``strategy`` has one non-empty list per tensor, or is a layout with one list each."""
    if isinstance(strategy, tuple):
        return bool(strategy) and all(strategy)
    tensors = strategy.get("in")
    lists = isinstance(tensors, list | tuple) and all(isinstance(dims, list | tuple) for dims in tensors)
    return lists and set(strategy) == {"matrix", "axes", "in"}


def _form(strategy: Slices | dict[str, Any]) -> str:
    if isinstance(strategy, tuple):
        return "one list per tensor, with one number of slices per dim"
    return "a layout such as {matrix: [2, 4], axes: [x, y], in: [[x, y], [x]]}, with one list per tensor"


def batch_shape_problem(strategy: Slices | dict[str, Any], dims: tuple[int, ...]) -> Problem | None:
    """Returns a problem unless ``strategy`` has as many tensors as a batch, each with as many dims.

    ``dims``: the number of dims of each tensor of a batch: its inputs, then its target.
    """
    tensors = strategy["in"] if isinstance(strategy, dict) else strategy
    if tuple(map(len, tensors)) == dims:
        return None
    have = ", ".join(f"input {i} has {many(n, 'dim')}" for i, n in enumerate(dims[:-1]))
    text = f"{written(strategy)}: a batch has {many(len(dims), 'tensor')}: {have}"
    text += f", the target has {many(dims[-1], 'dim')}"
    if isinstance(strategy, dict) or len({slices[0] for slices in strategy}) > 1:
        return Problem(KEY, text)

    # the cure keeps entries that fit; of the others it keeps only the cut of the samples
    fits = [len(slices) == n for slices, n in zip(strategy, dims, strict=False)]
    if any(max(s[1:], default=1) > 1 for s, fit in zip(strategy, fits, strict=False) if not fit):
        return Problem(KEY, text)
    kept = [s if fit else _sample_slices(s[0], n) for s, fit, n in zip(strategy, fits, dims, strict=False)]
    more = [_sample_slices(strategy[0][0], n) for n in dims[len(kept) :]]
    return Problem(KEY, text, _pasted((*kept, *more)))


def _sample_slices(count: int, dims: int) -> tuple[int, ...]:
    """Returns the slices of a tensor with ``dims`` dims of which only dim 0, the samples, is cut.

    >>> _sample_slices(4, 3)
    (4, 1, 1)
    """
    return (count, *(1 for _ in range(dims - 1)))


def _pasted(strategy: Slices) -> str:
    return quote(f"{KEY}={written(strategy)}")


def written(strategy: str | Slices | dict[str, Any]) -> str:
    """Formats ``strategy`` as the value of an override.

    >>> written(((8, 1), (8,)))
    '[[8,1],[8]]'
    """
    if isinstance(strategy, str):
        return strategy
    if isinstance(strategy, dict):
        return written_layout(strategy)
    return str([list(dims) for dims in strategy]).replace(" ", "")


def written_layout(layout: dict[str, Any]) -> str:
    """Formats ``layout`` as the value of an override.

    >>> written_layout({"matrix": [2, 4], "axes": ["x", "y"], "in": [["x", None], ["x"]]})
    '{matrix:[2,4],axes:[x,y],in:[[x,null],[x]]}'
    """
    return str(layout).replace("None", "null").replace("'", "").replace(" ", "")


def reading(job: Job, sizes: Sizes) -> BatchReading:
    """Returns who reads a batch.

    ``dataset_broadcast_opt_level`` 1 lets one stage read for all, 2 one rank of each tensor-parallel group,
    3 does both.
    """
    strategy, level = job.parallel.dataset_strategy, transformer_opt.broadcast_level(job)
    if sizes.engine.over_matrices:
        parts = 1  # all ranks of a stage read full samples and cut their parts out of them
    elif isinstance(strategy, str):
        parts = {"data_parallel": sizes.replicas, "full_batch": 1}[strategy]
    else:
        assert isinstance(strategy, tuple), strategy
        parts = strategy[0][0]
    return BatchReading(parts, over_stages=level in (1, 3), over_operators=level in (2, 3))


def rows(job: Job, sizes: Sizes) -> Iterator[Setting]:
    """Yields the setting, unless it is ``data_parallel`` and no device matrices are used."""
    strategy = job.parallel.dataset_strategy
    if sizes.engine.over_matrices:
        why = "every rank of a stage reads full samples, and each operator takes its part of them"
        yield Setting(KEY, written(strategy), "applied", why)
    elif strategy != "data_parallel":
        yield Setting(KEY, written(strategy), *_outcome(reading(job, sizes), sizes))


def _outcome(how: BatchReading, sizes: Sizes) -> Outcome:
    if sizes.replicas == 1:
        return "satisfied", "one data-parallel rank reads every sample"
    if how.parts == sizes.replicas:
        return "applied", "each data-parallel rank reads its own part, as with data_parallel"
    part = "the full batch" if how.parts == 1 else f"one of {how.parts} parts"
    read = many(sizes.global_batch // how.parts, "sample")
    keeps = f"keeps its slice of {sizes.local_batch}"
    return "applied", f"each data-parallel rank reads {part}, {read}, and {keeps}"
