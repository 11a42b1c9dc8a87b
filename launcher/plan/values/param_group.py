"""Parameters that an optimizer updates with the same settings."""

from __future__ import annotations

from dataclasses import dataclass

OptimizerSettings = tuple[tuple[str, float | str | tuple[float, float]], ...]


@dataclass(frozen=True)
class ParamGroup:
    """The first ``names`` of parameters that share ``settings``; ``key`` is one of ``optim.groups`` or "".

    ``settings`` are all that the optimizer keeps per group. They are not known for a user's optimizer class,
    which groups parameters itself.
    """

    key: str
    settings: OptimizerSettings
    names: tuple[str, ...]
