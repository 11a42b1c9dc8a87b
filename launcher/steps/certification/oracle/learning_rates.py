"""Learning rates by step, computed a second time."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi, sqrt

from launcher.job.schema.components import Schedule
from launcher.job.schema.optim import (
    WSD,
    Constant,
    CosineRestarts,
    Linear,
    NamedSchedule,
    Polynomial,
)
from launcher.job.schema.user_class import Target
from launcher.job.targets import build


def shares(schedule: Schedule, total: int, allow: tuple[str, ...]) -> Callable[[int], float]:
    """Returns factors of the learning rate by step (from 0), out of ``total``.

    A user's class supplies its own.
    """
    if not isinstance(schedule, Target):
        return lambda step: share(schedule, step, total)
    made: Callable[[int], float] = build(schedule, allow, Callable, key="schedule._target_")  # type: ignore[arg-type]
    return lambda step: float(made(step))


def share(schedule: NamedSchedule, step: int, total: int) -> float:
    """Returns the factor of the learning rate in optimizer step ``step`` (from 0) of ``total``.

    During warmup it rises to 1 in equal steps. Then it falls to ``final``, the factor of the last step. With
    restarts, the first step of the next period would have this factor, but starts at 1 again.
    """
    if step + 1 <= schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if isinstance(schedule, Constant):
        return 1.0
    if isinstance(schedule, WSD):
        height = _plateau(schedule, step, total)
    elif isinstance(schedule, CosineRestarts):
        height = _teeth(schedule, step - schedule.warmup_steps)
    else:
        way = min(1.0, (step - schedule.warmup_steps) / max(1, total - schedule.warmup_steps - 1))
        height = 1 - way if isinstance(schedule, Linear | Polynomial) else 0.5 + 0.5 * cos(pi * way)
        height = height**schedule.power if isinstance(schedule, Polynomial) else height
    return schedule.final + (1 - schedule.final) * height


def _plateau(schedule: WSD, step: int, total: int) -> float:
    """Returns 1 until the last steps, in which it falls to 0; these are at most the steps after warmup."""
    decay_steps = schedule.decay_steps
    falling = round(total * schedule.decay_share) if decay_steps is None else decay_steps
    falling = min(falling, total - schedule.warmup_steps)
    to_come = max(0, total - 1 - step)
    if to_come >= falling:
        return 1.0
    way = (falling - to_come) / falling
    return 1 - way if schedule.decay_shape == "linear" else 1 - sqrt(way)


def _teeth(schedule: CosineRestarts, step: int) -> float:
    """Returns half a cosine from each restart to the next; ``step`` counts from the end of the warmup."""
    start, length = 0, schedule.period_steps
    while start + length <= step:
        start, length = start + length, length * schedule.period_multiplier
    return 0.5 + 0.5 * cos(pi * ((step - start) / length))
