"""One setting and what it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["applied", "satisfied", "degraded"]

Outcome = tuple[Status, str]
"""What a setting gets, and why."""

ALONE = "one data-parallel rank, nothing to sum or to gather"


@dataclass(frozen=True)
class Setting:
    """One setting that asks for something special, and what it gets."""

    key: str
    value: str
    status: Status
    why: str
