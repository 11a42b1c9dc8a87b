"""Notes what ``model.config`` leaves as the ``config.json`` of a folder has it."""

from __future__ import annotations

import json

from launcher.job.schema.job import Job
from launcher.job.schema.models import HuggingFace
from launcher.plan.values.note import Note


def notes(job: Job) -> list[Note]:
    """Notes values of the folder that transformers would compute otherwise from the changed keys."""
    if not isinstance(job.model, HuggingFace) or not job.model.config:
        return []
    from launcher.models.hugging_face import stale

    where = f"the config.json of {job.model.path}"
    return [
        Note(
            f"model.config.{key}",
            f"{json.dumps(value)}: {where} says so; transformers would compute {json.dumps(now)} without it",
        )
        for key, value, now in stale(job.model)
    ]
