"""Settings of how ranks start: on this machine, under Slurm, on Kubernetes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
)
from pydantic_core import PydanticCustomError

from launcher.job.schema.base import Count, Flag, Index, Many, Number, Ranks, Settings

Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
Folder = Annotated[str, Field(pattern=r"^/")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]


class Kubernetes(Settings):
    """A Kubernetes job. A pod is a node: all of its ranks start in it."""

    kind: Literal["jobset", "pytorchjob", "skypilot"] = "jobset"
    image: str = Field(min_length=1, description="image of the pods, which contains launcher")
    claim: Name = Field(description="a persistent volume claim that all pods can write")
    mount: Folder = Field(description="folder at which the claim is mounted, here and in the pods")
    workdir: Folder | None = Field(None, description="folder that ranks start in; null: the current one")
    python: str = Field("python", min_length=1, description="Python command in the pods: python3")
    namespace: Name | None = None
    gpus_per_node: Index | None = None
    gpu: str | None = Field(None, min_length=1, description="name of the GPU, for SkyPilot")
    cpus: Count | None = Field(None, description="CPUs of a pod")
    memory_gb: Count | None = Field(None, description="memory of a pod")
    signal_s: Count = Field(300, description="seconds from SIGTERM to SIGKILL, in which a pod saves")
    setup: tuple[str, ...] = Field((), description="lines of bash before the ranks start")
    env: dict[str, Text] = {}
    env_from: Name | None = Field(None, description="a Secret whose keys become environment variables")
    labels: dict[str, Text] = {}
    node_selector: dict[str, Text] = {}


SlurmTime = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),  # minutes
    Field(pattern=r"^(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})$"),
]


def _one_word(text: str) -> str:
    """Refuses spaces and line breaks: sbatch would read more options, and bash would run more lines."""
    if not text or any(c.isspace() or not c.isprintable() for c in text):
        raise ValueError("should be one word, without spaces or line breaks")
    return text


SlurmName = Annotated[str, AfterValidator(_one_word)]


class Slurm(Settings):
    """A Slurm job. Its nodes and ranks are those of ``launch``."""

    partition: SlurmName | None = None
    account: SlurmName | None = None
    time: SlurmTime | None = None
    gpus_per_node: Index | None = None
    cpus_per_task: Count | None = None
    signal_s: Count | None = Field(
        None, description="ranks save this many seconds before the time limit; null: as measured, or 300"
    )
    extra: tuple[str, ...] = Field((), description="more options of sbatch")
    setup: tuple[str, ...] = Field((), description="lines of bash before the ranks start")
    container: str | None = None
    array: Flag = Field(True, description="a sweep is an array; false: one allocation for all of its cells")
    array_parallel: Count | None = Field(
        None, description="cells of a sweep that run at a time; null: all of an array, one in an allocation"
    )
    submit: Flag = Field(True, description="false: write the batch file only")


NOT_NAMES = ("gpu", "gpus", "nvidia", "none", "null", "true", "false")


def _torch_name(name: str) -> str:
    """Accepts torch's names for devices and backends, but not common words for a GPU."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in NOT_NAMES:
        raise PydanticCustomError("torch_name", "should be the name that torch uses, in lower case")
    return name


TorchName = Annotated[str, AfterValidator(_torch_name)]


class Launch(Settings):
    """How ranks start. ``nproc``: ranks per node; null: as many as the layout needs."""

    mode: Literal["auto", "spawn", "external", "inproc"] = "auto"
    nproc: Ranks | None = None
    nnodes: Ranks = 1
    backend: Literal["auto", "gloo", "nccl"] | TorchName = "auto"
    device: Literal["auto", "cpu", "cuda"] | TorchName = "auto"
    max_restarts: Index = 0
    elastic: Flag = Field(False, description="if torchrun starts fewer ranks than before, continue with them")
    timeout_s: Number = Field(600.0, gt=0)
    port: Annotated[int, Field(ge=0, le=65535, strict=True)] | None = Field(
        None, description="null: a free one, chosen by the system"
    )
    threads: Many = Field(1, description="CPU threads per rank")
    check_memory: Flag = Field(True, description="refuse a run that does not fit the memory of this machine")
    signal_save: Flag = Field(True, description="save a checkpoint before a signal stops the run")
    slurm: Slurm | None = Field(None, description="submit a job of Slurm instead of starting ranks here")
    k8s: Kubernetes | None = Field(
        None, description="write a job of Kubernetes instead of starting ranks here"
    )
