"""Certificates of small jobs, and the layouts that they certify."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launcher.data.open import open_data
from launcher.job.schema.steps import Certify
from launcher.plan.certify_copy import reduced
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.steps.certification.certificate import Certificate
from launcher.steps.certify import BUILDS, examine
from tests.parity import job
from tests.ranks import DRAWN, on_ranks

ALL: dict[str, Any] = {
    "pipeline": {"stages": 2, "micro_batch_num": 2}, "hsdp": {"shard_size": 2, "threshold": 0},
    "grid": {"dp_replicate": 2},
}  # fmt: skip
REPLICAS: dict[str, Any] = {"pipeline": {"stages": 2}, "grid": {"dp_replicate": 2}}
TWO: dict[str, Any] = {"pipeline": {"stages": 1, "micro_batch_num": 2}, "grid": {"dp_replicate": 2}}
SHARDED: dict[str, Any] = {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}}
STAGES: dict[str, Any] = {"pipeline": {"stages": 2}}
RISING: dict[str, Any] = {"name": "cosine", "warmup_steps": 20}


def of(net: str, **changes: Any) -> dict[str, Any]:
    """Return the settings of the model ``tests.steps.nets.<net>`` and of data for it."""
    arguments = {k.removeprefix("net_"): v for k, v in changes.items() if k.startswith("net_")}
    return {
        "model": {"_target_": f"tests.steps.nets.{net}", **arguments}, "data": {"_target_": "tests.steps.nets.Draws"},
        "security__allow": ("tests",), "train__batch_size": 16,
    } | {k: v for k, v in changes.items() if not k.startswith("net_")}  # fmt: skip


def certificate(parallel: dict[str, Any], step: Certify | None = None, **changes: Any) -> Certificate:
    """Return the certificate of a small job on real ranks."""
    asked = job(parallel=parallel, **{"schedule": RISING, **changes})
    copy = reduced(asked, step or Certify(), plan_job(asked).sizes)
    plan = plan_job(copy.job)

    def work(world: World, folder: Path) -> Certificate | None:
        data = open_data(copy.job.data, seed=copy.job.seed, allow=copy.job.security.allow)
        return examine(world, copy, plan, folder, data, DRAWN)

    DRAWN.add(copy.job, plan, BUILDS)
    with TemporaryDirectory() as folder:
        found = on_ranks(plan.sizes.grid.size, work, Path(folder))[0]
    assert found is not None
    return found
