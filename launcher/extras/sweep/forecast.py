"""What the plan of a cell predicts, and a digest that identifies cells with the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from launcher.job.schema import redact
from launcher.job.schema.job import Job
from launcher.plan.fits_machine import HEAP, Free, fit
from launcher.plan.plan import Plan
from launcher.plan.to_json import as_json
from launcher.run.launch_device import device
from launcher.run.memory_check import local_ranks

PLANNED = (
    "grid", "hsdp", "recompute", "operators", "mode", "pipeline.stages", "pipeline.stage_config",
    "pipeline.scheduler", "pipeline.interleave", "pipeline.chunks", "pipeline.micro_batch_num",
    "pipeline.seq_chunks", "pipeline.seq_split",
)  # fmt: skip
"""Settings below ``parallel`` whose resolved values are in the plan, however they are written."""
WORDS = ("name", "notes", "settings", "scheduler")
"""Parts of a plan that only describe how it was requested."""
ASIDE = {"sweep", "search", "recipe", "run_dir", "runs", "show"}
ENDLESS = Free(1 << 62)


@dataclass(frozen=True)
class Forecast:
    """Resources and speed of a cell: ``ranks`` with ``threads`` each, on ``nodes``.

    ``resident``: bytes of main memory on this machine. ``memory``: bytes of the rank that needs most.
    ``seconds``, ``samples`` and ``tokens`` are per step; only ``samples`` is known without a cluster.
    ``digest``: equal for cells that are the same run.
    """

    ranks: int
    nodes: int
    threads: int
    device: str
    resident: int
    memory: int
    bubble: float
    seconds: float | None
    mfu: float | None
    samples: int
    tokens: int | None
    digest: str

    @property
    def columns(self) -> Mapping[str, float]:
        """The predicted columns of a table."""
        columns: dict[str, float] = {
            "ranks": self.ranks,
            "planned_memory_mb": round(self.memory / 2**20, 1),
            "planned_bubble": round(self.bubble, 4),
        }
        if self.seconds is not None:
            columns["planned_step_ms"] = round(self.seconds * 1e3, 3)
            amount, unit = (self.samples, "samples") if self.tokens is None else (self.tokens, "tokens")
            columns[f"planned_{unit}_per_s"] = round(amount / self.seconds, 1)
        if self.mfu is not None:
            columns["planned_mfu"] = round(self.mfu, 4)
        return columns


def forecast(job: Job, plan: Plan) -> Forecast:
    """The forecast of ``plan``, which must be that of ``job``."""
    ranks, estimate = local_ranks(job, plan), plan.estimate
    size, step = plan.sizes.grid.size, plan.estimate.step
    needed = fit(job, plan, ranks, ENDLESS, besides={}) if ranks else None
    return Forecast(
        ranks=size,
        nodes=job.launch.nnodes,
        threads=job.launch.threads,
        device=device(job, ceil(size / job.launch.nnodes))[0],
        resident=0 if needed is None else int(needed.needed * HEAP),
        memory=max(m.total for m in estimate.memory),
        bubble=estimate.timeline.bubble,
        seconds=None if step is None else step.seconds,
        mfu=None if step is None else step.mfu,
        samples=plan.sizes.global_batch,
        tokens=None if step is None else step.tokens,
        digest=_digest(job, plan),
    )


def _digest(job: Job, plan: Plan) -> str:
    """A digest of the plan and the settings that may not be in it.

    If in doubt, equal runs get different digests: running a cell twice is better than not at all.
    """
    settings: dict[str, Any] = job.model_dump(mode="json", by_alias=True, exclude=ASIDE)
    for key in PLANNED:
        section: dict[str, Any] = settings["parallel"]
        *above, name = key.split(".")
        for part in above:
            section = section[part]
        section.pop(name)
    planned = {k: v for k, v in json.loads(as_json(plan)).items() if k not in WORDS}
    if planned["hsdp"] is not None:
        del planned["hsdp"]["shard_size"]  # the grid determines it
    text = json.dumps([redact.values(settings), planned], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
