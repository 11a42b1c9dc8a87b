"""A class of the user that a setting names."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from launcher.job.schema.base import Settings


class Target(Settings):
    """A user's own class: ``_target_`` is its dotted path, every other key an argument."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)
    target: str = Field(alias="_target_")

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
