"""Settings of debugging: limits, the profiler, drills."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    Field,
)

from launcher.job.schema.base import Count, Flag, Index, Number, Settings, Switch


class RankFault(Settings):
    """A fault of one rank of the plan's grid in one optimizer step; steps count from 1."""

    rank: Index
    step: Count


class SlowRank(RankFault):
    """A rank that is slow in this step and every later one."""

    ms: Number = Field(1000.0, gt=0, allow_inf_nan=False, description="milliseconds that it sleeps per step")


class NodeFault(Settings):
    """A fault of all ranks of one node in one optimizer step; steps count from 1."""

    node: Index
    step: Count


class Drill(Settings):
    """The faults that a drill can inject; one of them is set."""

    kill_rank: RankFault | None = Field(None, description="a rank is killed at the start of a step")
    hang_rank: RankFault | None = Field(None, description="a rank never reaches the step's first collective")
    slow_rank: SlowRank | None = Field(None, description="a rank sleeps in this step and every later one")
    torn_write: RankFault | None = Field(None, description="a rank is killed while it writes the checkpoint")
    bitflip: RankFault | None = Field(
        None, description="one bit of the newest checkpoint flips, and a rank is killed"
    )
    disk_full: RankFault | None = Field(None, description="the disk is full while the checkpoint is written")
    lose_node: NodeFault | None = Field(
        None, description="all ranks of a node are killed; needs torchrun or Slurm"
    )


class Profiler(Settings):
    """The profiler. ``steps``: the first and the last optimizer step of the window, counted from 1."""

    steps: tuple[Count, Count] | None = Field(None, description="null: all of the training")
    ranks: tuple[Index, ...] | None = Field(None, min_length=1, description="null: each rank")
    memory: Flag = Field(False, description="a snapshot of the device's memory; on a CPU: bytes in the trace")


class Debug(Settings):
    """Debugging. ``limit``: train only this many steps. ``overfit``: repeat only this many samples.

    ``graphs``: draw what each stage runs into the run folder. ``drill``: a fault to inject. ``profiler``: the
    steps and ranks to profile.
    """

    limit: Count | None = None
    overfit: Count | None = None
    anomaly: Flag = False
    profiler: Annotated[Profiler | None, Switch] = None
    onerank: Flag = False
    graphs: Flag = False
    drill: Drill | None = None
