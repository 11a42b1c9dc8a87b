"""The learning-rate schedule, as a fraction of ``optim.lr``."""

from __future__ import annotations

from math import cos, pi

from launcher.job.schema.components import Constant, Schedule


def factor(settings: Schedule, step: int, total: int) -> float:
    """For optimizer step ``step`` (from 0) of ``total``.

    ``warmup_steps`` rise evenly to 1, reached by the last of them; then from 1 down to
    ``final`` at the last step.

    >>> from launcher.job.schema.components import Linear
    >>> [factor(Linear(name="linear", warmup_steps=2), step, 7) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if isinstance(settings, Constant):
        return 1.0
    done = min((step - warmup) / max(total - 1 - warmup, 1), 1.0)
    left = 1 - done if settings.name == "linear" else (1 + cos(pi * done)) / 2
    return settings.final + (1 - settings.final) * left
