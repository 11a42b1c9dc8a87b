"""``launch.k8s``: a Kubernetes job, written as text. Its nodes and ranks are those of ``launch``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from launcher.job.schema.base import Count, Index, Settings

Text = Annotated[str, BeforeValidator(lambda given: str(given) if type(given) is int else given)]
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
