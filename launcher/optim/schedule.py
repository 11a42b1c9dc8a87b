"""Learning rates: built-in schedules and those of users."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import ceil, cos, isfinite, nan, pi, sqrt
from numbers import Real
from reprlib import repr as short

from launcher.errors import Problem, RunError
from launcher.job.schema.components import Schedule
from launcher.job.schema.optim import WSD, Constant, Cosine, CosineRestarts, Linear, NamedSchedule, Polynomial
from launcher.job.schema.user_class import Target
from launcher.job.targets import build
from launcher.user_errors import owned


def factors(settings: Schedule, total: int, allow: tuple[str, ...]) -> Callable[[int], float]:
    """Returns the function from an optimizer step (from 0) of ``total`` to its factor.

    ``allow`` lists the packages that ``_target_`` may name.
    """
    if not isinstance(settings, Target):
        return partial(factor, settings, total=total)

    return build_own(settings, allow)


def factor(settings: NamedSchedule, step: int, total: int) -> float:
    """Returns the factor of optimizer step ``step`` (from 0) of ``total``.

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
    remaining = _remaining(settings, step - warmup, total - warmup)
    return settings.final + (1 - settings.final) * remaining


def _remaining(settings: Cosine | Linear | Polynomial | CosineRestarts | WSD, step: int, total: int) -> float:
    """Returns the remaining part, from 1 to 0, at step ``step`` of the ``total`` steps after warmup."""
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
            # at most the steps after warmup: debug.limit may cut the training short
            decay = min(settings.decay(total + settings.warmup_steps), total)
            return _stable(step - (total - decay) + 1, decay, settings.decay_shape)


def _of_period(step: int, period: int, multiplier: int) -> float:
    """Returns the fraction of the current period that is over at ``step``.

    Each period is ``multiplier`` times as long as the one before.
    """
    if multiplier == 1:
        return (step % period) / period
    while step >= period:
        step -= period
        period *= multiplier
    return step / period


def _stable(step: int, decay: int, shape: str) -> float:
    """Returns 1 before the last ``decay`` steps, and in these a value that falls to 0 at the last of them.

    ``step`` counts from 1 at the first of the ``decay`` steps.
    """
    if step < 1 or decay < 1:
        return 1.0
    done = min(step / decay, 1.0)
    return 1 - done if shape == "linear" else 1 - sqrt(done)


KEY = "schedule._target_"
MOST = 1_000_000
"""The most steps that are tried; in a longer training they are evenly spaced up to the last step."""
AGAIN = 1_000
"""The most steps that are tried a second time, without the steps between them."""


def build_own(settings: Target, allow: tuple[str, ...]) -> Callable[[int], float]:
    """Returns a function of the step (from 0) that calls the user's instance.

    Raises ``RequestError``; the function raises ``RunError`` if the value is not a factor.
    """
    made = _made(settings, allow)

    def factor(step: int) -> float:
        value = made(step)
        number = _number(value)
        if number is None:
            raise RunError(f"step {step + 1}: {settings.target} returns {_bad_factor(value)}")
        return number

    return factor


def problem(
    settings: Target,
    allow: tuple[str, ...],
    steps: int,
    undone: Callable[[object], AbstractContextManager[object]] = nullcontext,
) -> Problem | None:
    """Returns the problem of the schedule at one of the ``steps``, if it has one.

    ``undone`` returns a block in which changes to variables of the schedule's file are undone on exit: a
    resumed run is a new process. Raises ``RequestError`` if the schedule cannot be built or called.
    """
    tried = range(steps - 1, -1, -ceil(steps / MOST))[::-1]
    again = tried[:: -ceil(len(tried) / AGAIN)]
    name, made, multipliers = settings.target, _made(settings, allow), {}
    with undone(made):
        for step in tried:
            with owned(KEY, f"{name}: it cannot be called with step {step}"):
                value = made(step)
            number = _number(value)
            if number is None:
                return Problem(KEY, f"{name}: at step {step} it returns {_bad_factor(value)}")
            if step in again:
                multipliers[step] = number

    # a run that resumes begins with another step
    other = _made(settings, allow)
    for step in again:
        with owned(KEY, f"{name}: it cannot be called with step {step} first"):
            value = other(step)
        if _number(value) != multipliers[step]:
            text = (
                f"at step {step} it returns {multipliers[step]} after earlier steps, "
                f"but {short(value)} without them"
            )
            return Problem(KEY, f"{name}: {text}; a resumed run may begin at any step")
    return None


def _made(settings: Target, allow: tuple[str, ...]) -> Callable[[int], object]:
    with owned(KEY, f"{settings.target}: cannot be built"):
        return build(settings, allow, Callable, key=KEY)  # type: ignore[arg-type]


def _number(value: object) -> float | None:
    """Returns the value as a float if it is a factor: finite and at least 0."""
    try:
        number = float(value) if isinstance(value, Real) else nan
    except OverflowError:  # an int beyond all floats
        return None
    return number if isfinite(number) and number >= 0 else None


def _bad_factor(value: object) -> str:
    return f"{short(value)}, but a factor of optim.lr must be a finite number of at least 0"
