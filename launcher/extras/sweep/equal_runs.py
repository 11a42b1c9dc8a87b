"""A digest that is equal for cells that are the same run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from launcher.job.schema import redact
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.show.plan_json import as_json

PLANNED = (
    "grid", "hsdp", "recompute", "operators", "mode", "pipeline.stages", "pipeline.stage_config",
    "pipeline.scheduler", "pipeline.interleave", "pipeline.chunks", "pipeline.micro_batch_num",
    "pipeline.seq_chunks", "pipeline.seq_split",
)  # fmt: skip
"""Settings below ``parallel`` whose resolved values are in the plan, however they are written."""
WORDS = ("name", "notes", "settings", "scheduler")
"""Parts of a plan that only describe how it was requested."""
ASIDE = {"sweep", "search", "recipe", "run_dir", "runs", "show"}
"""Keys of a request that do not change the run."""


def run_digest(job: Job, plan: Plan) -> str:
    """Returns a digest of the plan, and of the settings that the plan might not contain.

    If in doubt, equal runs get different digests: running a cell twice is better than skipping another.
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
    text = json.dumps([redact.identified(settings), planned], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
