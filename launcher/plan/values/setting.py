"""A setting as the plan decided it: applied, satisfied or degraded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["applied", "satisfied", "degraded"]

Outcome = tuple[Status, str]
"""The status of a setting, and the reason for it."""

ALONE = "one data-parallel rank, so nothing is summed or gathered"


@dataclass(frozen=True)
class Setting:
    """A setting that is not at its default, its status, and the reason for it."""

    key: str
    value: str
    status: Status
    why: str
