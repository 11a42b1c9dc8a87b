"""``debug.profiler``: the part of training that torch's profiler records."""

from __future__ import annotations

from pydantic import Field

from launcher.job.schema.base import Count, Flag, Index, Settings


class Profiler(Settings):
    """The profiler. ``steps``: the first and the last optimizer step of the window, counted from 1."""

    steps: tuple[Count, Count] | None = Field(None, description="null: all of the training")
    ranks: tuple[Index, ...] | None = Field(None, min_length=1, description="null: each rank")
    memory: Flag = Field(False, description="a snapshot of the device's memory; on a CPU: bytes in the trace")
