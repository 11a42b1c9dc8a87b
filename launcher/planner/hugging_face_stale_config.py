"""Notes values of ``config.json`` that no longer fit the keys that ``model.config`` changes."""

from __future__ import annotations

import json

from launcher.job.schema.job import Job
from launcher.job.schema.models import HuggingFace
from launcher.plan.values.note import Note


def notes(job: Job) -> list[Note]:
    """Returns a note for each value that transformers would compute differently from the changed keys."""
    if not isinstance(job.model, HuggingFace) or not job.model.config:
        return []
    from launcher.models.hugging_face import stale

    where = f"the config.json of {job.model.path}"
    return [
        Note(
            f"model.config.{key}",
            f"{json.dumps(value)}: from {where}; "
            f"from the changed keys transformers would compute {json.dumps(now)}",
        )
        for key, value, now in stale(job.model)
    ]
