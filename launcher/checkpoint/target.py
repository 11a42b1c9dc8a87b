"""The layout of a checkpoint asked for in a job's words: so many ranks, stages and shards."""

from __future__ import annotations

from launcher.checkpoint.strategy import STAGE, Entry, Strategy, relaid, stages
from launcher.errors import RequestError
from launcher.plan import merging
from launcher.plan.grid import Grid

LARGE = 64 * 1024  # bytes; as parallel.hsdp.threshold


def target_strategy(src: Strategy, *, nproc: int, stages: int, shard_size: int) -> Strategy:
    """The tensors of ``src`` over ``stages`` pipeline stages, each with ``nproc // stages`` ranks.

    Stages are merged, never cut (that takes the model): source stage ``s`` goes to ``s * stages // source stages``, a
    tied tensor to each of its stages. Dim 0 is cut over ``shard_size`` ranks for the tensors that the source cut
    anywhere; if it cut none, for parameters and optimizer states of at least 64 KB. Raises ``RequestError``.
    """
    if found := tuple(merging.refused("steps.transform", src.stages, nproc, stages, shard_size)):
        raise RequestError(found)
    replicas = nproc // (stages * shard_size)
    grid = Grid.of(pp=stages, dp_replicate=replicas, dp_shard=shard_size, tp=1)
    cut = any(e.layout.axes for e in src.entries.values())
    return Strategy(grid, {n: _entry(e, grid, src.stages, cut) for n, e in src.entries.items()})


def _entry(entry: Entry, grid: Grid, before: int, cut: bool) -> Entry:
    large = entry.kind != "buffer" and entry.spec.nbytes >= LARGE
    shards = grid["dp_shard"] > 1 and (bool(entry.layout.axes) if cut else large)
    at = tuple(sorted({s * grid[STAGE] // before for s in stages(entry.layout)}))
    return relaid(entry, grid, ("dp_shard",) if shards else (), ((STAGE, at),))
