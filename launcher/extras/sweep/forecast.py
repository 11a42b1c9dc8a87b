"""What the plan of a cell predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from launcher.extras.sweep.equal_runs import run_digest
from launcher.job.schema.job import Job
from launcher.plan.fits_free_memory import HEAP, Free, fit
from launcher.plan.plan import Plan
from launcher.run.launch_device import device
from launcher.run.memory_check import local_ranks

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
    """Returns the forecast of ``plan``, which must be that of ``job``."""
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
        digest=run_digest(job, plan),
    )
