"""Writes a job as a recipe that runs unchanged, without the files that the request was composed from."""

from __future__ import annotations

from typing import Any

import yaml

from launcher.job.schema.job import Job

GROUPS = ("model", "data", "loss", "optim", "schedule", "steps")
"""Sections with one of several options: all of their keys are written."""
ASIDE = {"recipe", "show", "run_dir", "search", "sweep"}


def text(job: Job, said: tuple[str, ...]) -> str:
    """A recipe with all settings that are not defaults; ``said``: comments."""
    whole = job.model_dump(mode="json", by_alias=True)
    changed = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    data: dict[str, Any] = {"defaults": [{f"override /{group}": None} for group in GROUPS]}
    for section, value in whole.items():
        if section in ASIDE:
            continue
        if section in GROUPS:
            data[section] = value
        elif section in changed:
            data[section] = changed[section]
    lines = [f"# {line}" for line in said]
    return "\n".join([*lines, yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)])
