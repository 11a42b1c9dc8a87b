"""Settings of Kubernetes jobs, drills and the profiler."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from launcher.job.schema.base import Count, Flag, Index, Settings

Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
Folder = Annotated[str, Field(pattern=r"^/")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]


class Kubernetes(Settings):
    """A Kubernetes job. A pod is a node: all of its ranks start in it."""

    kind: Literal["jobset", "pytorchjob", "skypilot"] = "jobset"
    image: str = Field(min_length=1, description="of the pods, with launcher in it")
    claim: Name = Field(description="a persistent volume claim that all pods can write")
    mount: Folder = Field(description="where its folders are, here and in the pods")
    workdir: Folder | None = Field(None, description="folder that ranks start in; null: the current one")
    python: str = Field("python", min_length=1, description="of the pods")
    namespace: Name | None = None
    gpus_per_node: Index | None = None
    gpu: str | None = Field(None, min_length=1, description="its name, for SkyPilot")
    cpus: Count | None = Field(None, description="of a pod")
    memory_gb: Count | None = Field(None, description="of a pod")
    signal_s: Count = Field(300, description="seconds that a pod has to save when it is told to stop")
    setup: tuple[str, ...] = Field((), description="lines of bash before the ranks start")
    env: dict[str, Text] = {}
    env_from: Name | None = Field(None, description="a Secret whose keys are variables of the environment")
    labels: dict[str, Text] = {}
    node_selector: dict[str, Text] = {}


class RankFault(Settings):
    """A fault of a rank of the plan's grid in an optimizer step, counted from 1."""

    rank: Index
    step: Count


class SlowRank(RankFault):
    """A rank that is slow in this step and every later one."""

    ms: float = Field(1000.0, gt=0, allow_inf_nan=False, description="milliseconds that it sleeps per step")


class NodeFault(Settings):
    """A fault of all ranks of a node, in an optimizer step, counted from 1."""

    node: Index
    step: Count


class Drill(Settings):
    """The faults; one of them is set."""

    kill_rank: RankFault | None = Field(None, description="a rank is killed at the start of a step")
    hang_rank: RankFault | None = Field(None, description="it never comes to the step's first collective")
    slow_rank: SlowRank | None = Field(None, description="it sleeps in every step from then on")
    torn_write: RankFault | None = Field(None, description="it is killed while it writes the checkpoint")
    bitflip: RankFault | None = Field(
        None, description="one bit of the newest checkpoint flips, and the rank is killed"
    )
    disk_full: RankFault | None = Field(None, description="the disk takes no more of the checkpoint")
    lose_node: NodeFault | None = Field(None, description="all ranks of a node are killed; torchrun or Slurm")


class Profiler(Settings):
    """The profiler. ``steps``: the first and the last optimizer step of the window, counted from 1."""

    steps: tuple[Count, Count] | None = Field(None, description="null: all of the training")
    ranks: tuple[Index, ...] | None = Field(None, min_length=1, description="null: each rank")
    memory: Flag = Field(False, description="a snapshot of the device's memory; on a CPU: bytes in the trace")
