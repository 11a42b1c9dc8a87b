"""Whether a model of the user's own takes the documents of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, signature
from typing import TYPE_CHECKING

from launcher.errors import Problem
from launcher.job.schema.components import ModelTarget, Tokens
from launcher.job.schema.job import Job

if TYPE_CHECKING:
    from launcher.planner.trace_model import ModelRead

KEY, NAME = "data.document_mask", "documents"
PLACED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def untaken(job: Job, read: ModelRead) -> Iterator[Problem]:
    """A second input of another name means something else, and would be wrong without a word."""
    asked = isinstance(job.data, Tokens) and job.data.document_mask
    if not asked or not isinstance(job.model, ModelTarget):
        return
    takes = [p.name for p in signature(read.module.forward).parameters.values() if p.kind in PLACED]
    if takes[1:2] != [NAME]:
        text = f"true: the forward of {job.model.target} takes ({', '.join(takes)}), and no documents to keep"
        cure = f"let it be forward(self, tokens, {NAME}), whose attention stays within documents"
        yield Problem(KEY, f"{text} apart; {cure}", f"{KEY}=false")
