"""Parameters that an optimizer updates with the same settings."""

from __future__ import annotations

from dataclasses import dataclass

OptimizerSettings = tuple[tuple[str, float | str | tuple[float, float]], ...]


@dataclass(frozen=True)
class ParamGroup:
    """``names`` are first names; ``key`` is one of ``optim.groups``, "" for what is in none.

    ``settings`` are all that the optimizer has of its own for each group; those of a class of the user's own,
    which groups parameters itself, are not known.
    """

    key: str
    settings: OptimizerSettings
    names: tuple[str, ...]
