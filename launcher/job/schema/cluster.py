"""``cluster``: the machines that a plan is made for."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from launcher.job.schema.base import Count, Number, Settings

Positive = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(gt=0, le=1)]
NotNegative = Annotated[Number, Field(ge=0)]
Precision = Literal["fp64", "fp32", "bf16", "fp16"]


class Link(Settings):
    """A link from one device to the next."""

    latency_us: NotNegative = Field(description="time of each step of a ring")
    gb_per_s: Positive = Field(description="speed at which a device receives")
    message_gb_per_s: Positive | None = Field(
        None, description="speed of a message from one device to another; null: gb_per_s"
    )


class NodeLink(Link):
    """The links inside a node: through switches, or a direct line between any two devices."""

    mesh: bool = Field(
        False,
        description="each pair of devices has its own line; gb_per_s is the sum of a device's lines, "
        "and a small group uses few of them",
    )


class Links(Settings):
    """The links ``inside`` a node and ``between`` nodes; ``between`` is one device's share of the network."""

    inside: NodeLink
    between: Link


class KernelEfficiency(Settings):
    """What limits kernels below a device's peak.

    A product of (m, k) and (k, n) reaches ``efficiency`` / (1 + ``small`` (1/m + 1/n + 1/k)).
    """

    small: NotNegative = Field(150, description="about the length at which a product loses half of its speed")
    attention: Share = Field(0.5, description="share of the peak that fused attention reaches")
    memory: Share = Field(0.75, description="share of memory_gb_per_s that kernels reach")
    moved: Share = Field(1.0, description="share of the bytes that still move where kernels are fused")
    launch_us: NotNegative = Field(5, description="time of the host per kernel")
    alone: Annotated[Number, Field(ge=1)] = Field(
        1, description="how many times faster a core of cores_per_node is while the others are idle"
    )


class Overheads(Settings):
    """Costs besides kernels and messages. ``near_limit``: on a full device the allocator must retry."""

    scatter: Positive = Field(
        1.0,
        description="how often the bytes of a reduce-scatter go around the ring; "
        "2 with gloo, which reduces all of them on each rank",
    )
    exposed: NotNegative = Field(
        0.3, description="share of the gradients' time on the network for which ranks wait"
    )
    exposed_sums: NotNegative = Field(0.3, description="the same share for unsharded gradients")
    exposed_tp: NotNegative = Field(1.0, description="the same share for collectives over tp")
    slot_ms: NotNegative = Field(0, description="time of the host per action of a pipeline")
    step_ms: NotNegative = Field(0, description="time added to each step")
    crossing_ms: NotNegative = Field(
        0, description="time per collective and rank of tp, if pipelines cross nodes"
    )
    stall_ms: NotNegative = Field(
        0, description="time added to a hop between stages on 512 devices; times (n/512)**3 on n devices"
    )
    near_limit: NotNegative = Field(0, description="share by which a full device makes a step longer")
    fragments: NotNegative = Field(0, description="memory lost in the allocator, as a share of the plan's")
    reserve_gb: NotNegative = Field(0, description="memory of a device for uses outside the plan")


class Cluster(Settings):
    """The machines. Null means unknown. Speeds are given all together or not at all."""

    name: str | None = None
    memory_gb: Positive | None = Field(None, description="memory of a rank's device; null: unknown")
    devices_per_node: Count | None = None
    cores_per_node: Count | None = Field(
        None, description="if ranks are processes on the cores of a node: how many compute at once"
    )
    tflops: dict[Precision, Positive] | None = None
    efficiency: Share | None = None
    memory_gb_per_s: Positive | None = None
    links: Links | None = None
    kernels: KernelEfficiency = KernelEfficiency()
    overheads: Overheads = Overheads()

    @model_validator(mode="after")
    def _together(self) -> Self:
        lacking = [n for n in SPEEDS if not getattr(self, n)]
        if 0 < len(lacking) < len(SPEEDS):
            raise ValueError(f"give {', '.join(lacking)} with the other speeds, or give none")
        return self


SPEEDS = ("devices_per_node", "tflops", "efficiency", "memory_gb_per_s", "links")
