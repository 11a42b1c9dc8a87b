"""Notes which values of ``config.json`` stay although ``model.config`` changes what they follow from."""

from __future__ import annotations

import json

from launcher.job.schema.job import Job
from launcher.job.schema.models import HuggingFace
from launcher.plan.values.note import Note


def notes(job: Job) -> list[Note]:
    """Notes values of the folder that transformers would compute differently from the changed keys."""
    if not isinstance(job.model, HuggingFace) or not job.model.config:
        return []
    from launcher.models.hugging_face import stale

    where = f"the config.json of {job.model.path}"
    return [
        Note(
            f"model.config.{key}",
            f"{json.dumps(value)}: from {where}; without it transformers would compute {json.dumps(now)}",
        )
        for key, value, now in stale(job.model)
    ]
