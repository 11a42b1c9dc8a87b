"""The section ``checkpoint``: when a training saves, and what it keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from launcher.job.schema.base import Count, Flag, Goal, Settings
from launcher.job.schema.paths import FilePath, local

KEY_FILE = "file:"
"""The start of the place of a key that is in a file."""


class Checkpoint(Settings):
    """Checkpoints. ``every``: optimizer steps between checkpoints during training; null: none.

    ``keep``: the number of newest checkpoints that are kept; null: all.
    """

    every: Count | None = None
    keep: Count | None = 2
    best: str | None = Field(
        None, min_length=1, description="a metric of validations: the best checkpoint is kept too"
    )
    best_goal: Goal = "min"
    format: Literal["safetensors"] = "safetensors"
    asynchronous: Flag = Field(False, alias="async")
    encrypt: str | None = None
    accept_plain: Flag = False
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="what to do if the disk is full while a training saves"
    )
    accept_changes: tuple[str, ...] = ()
    resume: FilePath = "auto"

    @field_validator("encrypt")
    @classmethod
    def _key_file(cls, place: str | None) -> str | None:
        if place is not None and place.startswith(KEY_FILE):
            local(place.removeprefix(KEY_FILE))
        return place
