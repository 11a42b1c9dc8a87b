"""Ranks, stages and micro batches of a request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from launcher.plan.schedule.schedules import placement
from launcher.plan.values.grid import Grid
from launcher.plan.values.note import Note
from launcher.plan.values.resolved import OVER_TP, EngineChoice


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Each rank has ``chunks`` of the ``virtual`` stages, placed round after round or, with ``v``, in a V.
    Batches are counted in samples; ``local_batch`` is that of a data-parallel rank. ``pieces``: chunks into
    which the sequences of a micro batch are cut in training. ``epochs``: the number from which ``steps`` was
    computed, if the request states epochs. ``engine``: how operators are cut. A device matrix has all ranks
    of a stage; the grid then has these ranks on its axis ``tp``.
    """

    grid: Grid
    chunks: int
    micros: int
    global_batch: int
    local_batch: int
    micro_batch: int
    steps: int
    notes: tuple[Note, ...]
    v: bool = False
    pieces: int = 1
    epochs: int | None = None
    engine: EngineChoice = OVER_TP

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The pipeline rank of each virtual stage."""
        return placement(self.grid["pp"], self.chunks, self.v)

    def stages_of(self, pp: int) -> tuple[int, ...]:
        """Returns the virtual stages of a pipeline rank, in order."""
        return tuple(s for s, rank in enumerate(self.places) if rank == pp)

    @property
    def virtual(self) -> int:
        return self.grid["pp"] * self.chunks

    @property
    def replicas(self) -> int:
        """The number of data-parallel ranks; each reads its own samples."""
        return self.grid["dp_replicate"] * self.grid["dp_shard"]
