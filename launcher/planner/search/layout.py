"""A layout that the search may choose: a value for each setting that is searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from launcher.job.schema.job import Job
from launcher.job.schema.parallel import CommFusion, Grid, Hsdp, Network, Recompute
from launcher.job.schema.search import Search
from launcher.plan.prediction.speeds import Speeds

PIPELINE = "parallel.pipeline"
RECOMPUTE = "parallel.recompute"
KEYS = {
    "tp": "parallel.grid.tp",
    "operators": "parallel.operators",
    "stages": f"{PIPELINE}.stages",
    "scheduler": f"{PIPELINE}.scheduler",
    "chunks": f"{PIPELINE}.chunks",
    "micros": f"{PIPELINE}.micro_batch_num",
    "hsdp": "parallel.hsdp",
    "recompute": RECOMPUTE,
}
"""The setting of each field."""


Cut = tuple[int, str]
"""The number of tp ranks, and the name of the operator strategies that use them."""


Trace = tuple[Cut, int, bool]
"""Everything that a traced forward depends on: the cut, samples per micro batch, whether one stage is all."""


@dataclass(frozen=True)
class Layout:
    """``replicas``: the number of data-parallel ranks; ``micro``: samples per micro batch.

    ``operators`` and ``recompute`` name candidates; ``chunks`` 1 means one stage per rank.
    """

    tp: int
    operators: str
    stages: int
    scheduler: str
    chunks: int
    micros: int
    hsdp: Hsdp | None
    recompute: str
    replicas: int
    micro: int

    @property
    def order(self) -> tuple[Any, ...]:
        """A sort key for layouts that are equally good: the simpler one first."""
        sharing = ("", 0) if self.hsdp is None else (self.hsdp.optimizer_level, self.hsdp.shard_size)
        plain = (self.stages, self.tp, self.operators, self.chunks, self.scheduler)
        return (*plain, sharing, self.recompute, self.micros)

    @property
    def cut(self) -> Cut:
        return self.tp, self.operators

    @property
    def shape(self) -> tuple[str, int, int, int]:
        """What determines the pipeline's bubble."""
        return self.scheduler, self.stages, self.chunks, self.micros

    def shown(self) -> dict[str, str]:
        """The value of each setting as a user types it, by field name."""
        sharing = "none"
        if self.hsdp is not None:
            sharing = f"{self.hsdp.optimizer_level}/{self.hsdp.shard_size}"
        values = {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name in KEYS}
        return values | {"hsdp": sharing}


@dataclass(frozen=True)
class Candidates:
    """The settings behind the names of candidates."""

    operators: Mapping[str, Any]
    recompute: Mapping[str, Recompute | None]


def job_of(job: Job, layout: Layout, named: Candidates, speeds: Speeds | None = None) -> Job:
    """``job`` in this layout; ``speeds``: the network to which sizes of collectives are fitted."""
    par = job.parallel
    pipe = par.pipeline.model_copy(
        update={
            "stages": layout.stages,
            "scheduler": layout.scheduler,
            "interleave": layout.chunks > 1,
            "chunks": max(2, layout.chunks),
            "micro_batch_num": layout.micros,
        }
    )
    settings: dict[str, Any] = {
        "pipeline": pipe,
        "grid": Grid(tp=layout.tp),
        "operators": named.operators[layout.operators],
        "hsdp": layout.hsdp,
        "recompute": named.recompute[layout.recompute],
    }
    if speeds is not None and layout.replicas > 1:
        settings["comm_fusion"] = fitted(par.comm_fusion, layout, speeds)
    return job.model_copy(update={"parallel": par.model_copy(update=settings), "search": Search()})


def fitted(fusion: CommFusion, layout: Layout, speeds: Speeds) -> CommFusion:
    """Adds the latency and bandwidth of the data-parallel ring."""
    latency, rate = speeds.ring(range(0, layout.replicas * layout.tp, layout.tp))
    network = Network(latency_us=max(latency * 1e6, 1e-3), gb_per_s=rate / 1e9)
    return fusion.model_copy(update={"network": network})
