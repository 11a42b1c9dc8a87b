"""``sweep``: which runs a sweep has, how many run at a time, and how they are compared."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from launcher.job.schema.base import Count, Flag, Goal, Index, Settings

GRID: Final = "grid"


class Sweep(Settings):
    """Settings of a sweep (``-m``); a single run ignores them.

    ``parallel``: cells at a time; ``auto``: as many as cores or devices, and memory, allow. ``sampler``:
    ``grid`` runs every combination; the others, which use optuna, propose one cell after another until there
    are ``cells`` of them or ``minutes`` are over.
    """

    over: dict[str, str | tuple[Any, ...]] = Field(
        {}, description="axes: lists of values, or an interval as on the command line, by the key that varies"
    )
    parallel: Count | Literal["auto"] = "auto"
    sampler: Literal["grid", "random", "tpe"] = GRID
    cells: Count | None = Field(None, description="that a sampler proposes; null: as many as the time allows")
    minutes: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="after which no cell begins; null: no limit"
    )
    seed: Index = Field(0, description="of the sampler")
    metric: str | None = Field(
        None, min_length=1, description="null: val_loss, or loss where nothing is validated"
    )
    goal: Goal = "min"
    prune: Literal["asha", "median"] | None = Field(
        None, description="ends cells whose metric is behind at a validation"
    )
    seeds: Count = Field(1, description="runs of each cell, with one seed after another")
    plan: Flag = Field(False, description="plan all cells, print what is predicted, run none")
    certify: Flag = Field(False, description="compare the losses of cells that differ in their layout only")
