"""How many ranks, stages, micro batches and samples there are: the numbers that need no model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from launcher.plan.schedule.schedules import placement
from launcher.plan.values.grid import Grid


@dataclass(frozen=True)
class Note:
    """A default that was worked out, or anything else the reader of a plan should know."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key} {self.text}"

    @property
    def default(self) -> bool:
        """Whether it says what became of a key that left the choice to the plan.

        >>> Note("parallel.hsdp.shard_size", "-1 -> 4: the data-parallel group").default
        True
        """
        return self.text.startswith(("null -> ", "auto -> ", "-1 -> "))


@dataclass(frozen=True)
class Sizes:
    """``virtual`` stages lie ``chunks`` to a rank, round after round or (``v``) there and back.

    Batches are samples; ``local_batch`` is a data-parallel rank's. In training, the sequences of a micro
    batch pass in so many ``pieces``. ``epochs``: what ``steps`` come of, unless they were asked for.
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

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The pipeline rank of each virtual stage."""
        return placement(self.grid["pp"], self.chunks, self.v)

    def held(self, pp: int) -> tuple[int, ...]:
        """The virtual stages of a pipeline rank, in order."""
        return tuple(s for s, rank in enumerate(self.places) if rank == pp)

    @property
    def virtual(self) -> int:
        return self.grid["pp"] * self.chunks

    @property
    def replicas(self) -> int:
        """Data-parallel ranks: each reads its own samples."""
        return self.grid["dp_replicate"] * self.grid["dp_shard"]
