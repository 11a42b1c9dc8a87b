"""Whether a model of the user's own takes the documents of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, signature
from typing import TYPE_CHECKING

from launcher.errors import Problem
from launcher.job.schema.components import ModelTarget, apart
from launcher.job.schema.job import Job

if TYPE_CHECKING:
    from launcher.planner.trace_model import ModelRead

NAME = "documents"
PLACED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def untaken(job: Job, read: ModelRead) -> Iterator[Problem]:
    """A second input of another name means something else, and would be wrong without a word."""
    asked = apart(job.data)
    if asked is None or not isinstance(job.model, ModelTarget):
        return
    takes = [p.name for p in signature(read.module.forward).parameters.values() if p.kind in PLACED]
    if takes[1:2] != [NAME]:
        text = f"{asked.value}: the forward of {job.model.target} takes ({', '.join(takes)})"
        text = f"{text}, and no documents to keep"
        cure = f"let it be forward(self, tokens, {NAME}), whose attention stays within documents"
        yield Problem(asked.key, f"{text} apart; {cure}", asked.cure)
