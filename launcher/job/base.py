"""The base of every settings model: frozen, no unknown keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, strict=True)]
Index = Annotated[int, Field(ge=0, strict=True)]
Rate = Annotated[float, Field(ge=0)]


class Settings(BaseModel):
    """Frozen, strict about names; order of fields is the order in reports and in ``config.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=True)
