"""Which layouts ``transform`` can make: stages are merged, never cut, for cutting takes the model."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.plan.values.text import many


def refused(key: str, source: int | None, nproc: int, stages: int, shard_size: int, tp: int = 1) -> Iterator[Problem]:
    """What is wrong with a target below ``key``; ``source`` is the number of stages that there are, where known."""
    for name, n in (("nproc", nproc), ("stages", stages), ("shard_size", shard_size), ("tp", tp)):
        if n < 1:
            yield Problem(f"{key}.{name}", f"{n}: is not at least 1", f"{key}.{name}=1")
    if min(nproc, stages, shard_size, tp) < 1:
        return
    fits = stages
    if source is not None and source % stages:
        fits = max(n for n in range(1, min(stages, source) + 1) if source % n == 0)
        text = f"{stages}: cannot be made of {many(source, 'stage')}; stages are merged, not cut"
        yield Problem(f"{key}.stages", text, f"{key}.stages={fits}")
    unit = fits * shard_size * tp
    if nproc % unit:
        ways = f" x {tp}-way tensor parallelism" if tp > 1 else ""
        text = f"{nproc}: does not divide into {many(fits, 'stage')} x {many(shard_size, 'shard')}{ways}"
        yield Problem(f"{key}.nproc", text, f"{key}.nproc={-(-nproc // unit) * unit}")
