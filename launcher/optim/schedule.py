"""The learning-rate schedule, as a fraction of ``optim.lr``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import cos, pi, sqrt

from launcher.job.schema.components import Schedule, Target
from launcher.job.schema.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Linear,
    NamedSchedule,
    Polynomial,
)


def factors(settings: Schedule, total: int, allow: tuple[str, ...]) -> Callable[[int], float]:
    """Return the function from an optimizer step (from 0) of ``total`` to its factor.

    ``allow`` lists the packages that ``_target_`` may name.
    """
    if not isinstance(settings, Target):
        return partial(factor, settings, total=total)
    from launcher.optim.own_schedule import build_own

    return build_own(settings, allow)


def factor(settings: NamedSchedule, step: int, total: int) -> float:
    """Return the factor of optimizer step ``step`` (from 0) of ``total``.

    The factor rises evenly over ``warmup_steps`` and reaches 1 at the last of them. Then it falls from 1 to
    ``final`` at the last step, or towards it in each period of a schedule with restarts.

    >>> from launcher.job.schema.components import Linear
    >>> [factor(Linear(name="linear", warmup_steps=2), step, 7) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if isinstance(settings, Constant):
        return 1.0
    left = _left(settings, step - warmup, total - warmup)
    return settings.final + (1 - settings.final) * left


def _left(settings: Cosine | Linear | Polynomial | CosineRestarts | WSD, step: int, total: int) -> float:
    """Return the part that is left, from 1 to 0, in step ``step`` of the ``total`` after warmup."""
    done = min(step / max(total - 1, 1), 1.0)
    match settings:
        case Cosine():
            return (1 + cos(pi * done)) / 2
        case Linear():
            return 1 - done
        case Polynomial(power=power):
            return float((1 - done) ** power)
        case CosineRestarts(period_steps=period, period_multiplier=multiplier):
            return (1 + cos(pi * _of_period(step, period, multiplier))) / 2
        case WSD():
            # no more than warmup leaves: debug.limit may cut the training short
            decay = min(settings.decay(total + settings.warmup_steps), total)
            return _stable(step - (total - decay) + 1, decay, settings.decay_shape)


def _of_period(step: int, period: int, multiplier: int) -> float:
    """Return the part of its period that ``step`` has behind it.

    Each period is ``multiplier`` times as long as the one before.
    """
    if multiplier == 1:
        return (step % period) / period
    while step >= period:
        step -= period
        period *= multiplier
    return step / period


def _stable(step: int, decay: int, shape: str) -> float:
    """Return 1 before the last ``decay`` steps, and in these a value that falls to 0 at the last of them.

    ``step`` counts from 1 at the first of the ``decay`` steps.
    """
    if step < 1 or decay < 1:
        return 1.0
    done = min(step / decay, 1.0)
    return 1 - done if shape == "linear" else 1 - sqrt(done)
