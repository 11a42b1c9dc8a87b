"""Layouts that compute the same numbers in less memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Hsdp
from launcher.plan.plan import Plan


@dataclass(frozen=True)
class LighterLayout:
    """Settings below ``parallel``, and the overrides (``words``) that set them."""

    words: str
    settings: dict[str, Any]

    def __or__(self, other: LighterLayout) -> LighterLayout:
        return LighterLayout(f"{self.words} {other.words}", self.settings | other.settings)

    def applied_to(self, job: Job) -> Job:
        return job.model_copy(update={"parallel": job.parallel.model_copy(update=self.settings)})


def lighter(job: Job, plan: Plan) -> Iterator[LighterLayout]:
    """Yields layouts that compute the same numbers in less memory; the smallest changes come first."""
    sharded = list(_sharded(job, plan))
    smaller = list(_smaller(job, plan))
    yield from sharded
    yield from smaller
    if sharded:
        yield from (sharded[-1] | change for change in smaller)


def _sharded(job: Job, plan: Plan) -> Iterator[LighterLayout]:
    """Yields weights sharded over all data-parallel ranks, then also gathered again for each backward."""
    if plan.sizes.replicas == 1:
        return
    now = (job.parallel.hsdp or Hsdp()).model_copy(update={"shard_size": -1})
    fully_sharded = LighterLayout("parallel.hsdp.shard_size=-1", {"hsdp": now})
    cut = plan.sizes.grid["dp_replicate"] == 1
    if not cut:
        yield fully_sharded
    if now.optimizer_level != "level3":
        again = {"hsdp": now.model_copy(update={"optimizer_level": "level3"})}
        level = LighterLayout("parallel.hsdp.optimizer_level=level3", again)
        yield level if cut else fully_sharded | level


def _smaller(job: Job, plan: Plan) -> Iterator[LighterLayout]:
    """Yields smaller micro batches, unless their size affects a summed loss or a module with buffers."""
    sz, pipe = plan.sizes, job.parallel.pipeline
    if pipe.loss_reduction == "sum" or any(p.buffer for p in plan.params):
        return
    for n in (sz.micros * times for times in (2, 4, 8) if sz.micro_batch % times == 0):
        change = {"pipeline": pipe.model_copy(update={"micro_batch_num": n})}
        yield LighterLayout(f"parallel.pipeline.micro_batch_num={n}", change)
