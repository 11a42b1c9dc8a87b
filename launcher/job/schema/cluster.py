"""``cluster``: the machines that a plan is made for."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from launcher.job.schema.base import Count, Settings

Positive = Annotated[float, Field(gt=0)]
Precision = Literal["fp64", "fp32", "bf16", "fp16"]


class Links(Settings):
    """Between devices. ``gb_per_s``: what one receives in a collective, beside the nodes that this spans."""

    latency_us: Positive
    gb_per_s: tuple[tuple[Count, Positive], ...] = Field(min_length=1)

    def over(self, nodes: int) -> float:
        """Bytes a second over so many nodes: as of the next larger number that is listed, or the largest.

        >>> links = Links(latency_us=40, gb_per_s=((1, 250), (4, 120)))
        >>> links.over(1), links.over(2), links.over(64)
        (250000000000.0, 120000000000.0, 120000000000.0)
        """
        listed = sorted(self.gb_per_s)
        return next((rate for n, rate in listed if n >= nodes), listed[-1][1]) * 1e9


class Cluster(Settings):
    """What is null nobody says. Speeds are told all together or not at all."""

    name: str | None = None
    memory_gb: Positive | None = Field(None, description="of the device of a rank; null: nobody says")
    devices_per_node: Count | None = None
    tflops: dict[Precision, Positive] | None = None
    efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    memory_gb_per_s: Positive | None = None
    links: Links | None = None

    @model_validator(mode="after")
    def _together(self) -> Self:
        lacking = [n for n in SPEEDS if not getattr(self, n)]
        if 0 < len(lacking) < len(SPEEDS):
            raise ValueError(f"{', '.join(lacking)} are told together with the other speeds, or none is")
        return self


SPEEDS = ("devices_per_node", "tflops", "efficiency", "memory_gb_per_s", "links")
