"""Settings of a training."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
)

from launcher.job.schema.base import Count, Flag, Goal, Number, Settings, Size


class Compile(Settings):
    """How modules are compiled. ``modules``: ``auto`` (the blocks), ``stages``, names or globs.

    Each module is compiled separately. ``dynamic`` null: torch's default, static at first. ``timeout_s``: for
    the first step, instead of ``launch.timeout_s``.
    """

    modules: str | tuple[str, ...] = "auto"
    backend: str = Field("inductor", min_length=1)
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    fullgraph: Flag = True
    dynamic: Flag | None = False
    timeout_s: Number = Field(3600.0, gt=0)


class Ema(Settings):
    """A moving average: every ``every`` steps it becomes ``decay`` * average + (1 - ``decay``) * weights."""

    decay: Number = Field(0.999, gt=0, lt=1)
    every: Count = 1


class EarlyStop(Settings):
    """Ends training after ``patience`` validations without an improvement of more than ``min_delta``."""

    metric: str = Field("val_loss", min_length=1)
    patience: Count = 3
    min_delta: Number = Field(0.0, ge=0, allow_inf_nan=False)
    goal: Goal = "min"


class Train(Settings):
    """Training. ``batch_size`` is global: samples per optimizer step over all ranks.

    With ``epochs`` instead of ``steps``, the planner, which opens the data, computes the steps.
    """

    steps: Count | None = None
    epochs: Count | None = Field(None, description="times that every sample is trained on")
    batch_size: Size
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    loss_scale: Number | None = Field(
        None, gt=0, description="fp16 only; null: from 65536, halved at an overflow"
    )
    clip_norm: Number | None = Field(1.0, gt=0)
    compile: Compile | None = None
    ema: Ema | None = None
    log_every: Count = 1
    eval_every: Count | None = Field(
        None, description="optimizer steps between validations; null: none while training"
    )
    eval_batches: Count | None = Field(
        None, description="global batches a validation reads; null: all held-out samples"
    )
    early_stop: EarlyStop | None = None

    @field_validator("epochs")
    @classmethod
    def _said_once(cls, epochs: int | None, info: ValidationInfo) -> int | None:
        steps = info.data.get("steps", epochs)
        if epochs is None and steps is None and "steps" in info.data:
            text = "train.steps or train.epochs must say how long to train; set one of them"
            raise ValueError(f"train.steps=null: {text}")
        if None not in (epochs, steps) and "steps" in info.data:
            text = f"train.steps={steps} already says how long to train"
            raise ValueError(f"train.epochs={epochs}: {text}; use train.steps=null")
        return epochs
