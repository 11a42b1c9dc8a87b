"""Settings of each learning-rate schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from launcher.job.schema.base import Count, Fraction, Index, Settings


class Constant(Settings):
    name: Literal["constant"]
    warmup_steps: Index = 0


class Cosine(Settings):
    name: Literal["cosine"]
    warmup_steps: Index = 0
    final: Fraction = Field(0.1, description="share of optim.lr left at the last step")


class Linear(Settings):
    name: Literal["linear"]
    warmup_steps: Index = 0
    final: Fraction = 0.0


class Polynomial(Settings):
    name: Literal["polynomial"]
    warmup_steps: Index = 0
    power: float = Field(2.0, gt=0)
    final: Fraction = 0.0


class CosineRestarts(Settings):
    """SGDR (Loshchilov and Hutter 2017)."""

    name: Literal["cosine_restarts"]
    warmup_steps: Index = 0
    period_steps: Count = Field(description="optimizer steps from the end of warmup to the first restart")
    period_multiplier: Count = 1
    final: Fraction = 0.0


class WSD(Settings):
    """Warm up, stay, decay (Hu et al. 2024, MiniCPM)."""

    name: Literal["wsd"]
    warmup_steps: Index = 0
    decay_share: Fraction = 0.2
    decay_steps: Index | None = None
    decay_shape: Literal["linear", "1-sqrt"] = "1-sqrt"
    final: Fraction = 0.0

    def decay(self, total: int) -> int:
        """The number of steps out of ``total`` that decay; ``decay_steps`` overrides ``decay_share``."""
        return round(self.decay_share * total) if self.decay_steps is None else self.decay_steps


NamedSchedule = Constant | Cosine | Linear | Polynomial | CosineRestarts | WSD
