"""A user-defined learning-rate schedule: it is built, and tried at the steps of the run."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, isfinite, nan
from numbers import Real
from reprlib import repr as short

from launcher.errors import Problem, RunError, owned
from launcher.job.schema.components import Target
from launcher.job.targets import build

KEY = "schedule._target_"
MOST = 1_000_000
"""Most steps that are tried; of a longer training this many, evenly spaced up to the last."""
AGAIN = 1_000
"""Most steps that are tried a second time, in another order."""


def build_own(settings: Target, allow: tuple[str, ...]) -> Callable[[int], float]:
    """Return a function of the step (from 0) that calls the user's instance.

    Raises ``RequestError``; the function raises ``RunError`` if the value is no factor.
    """
    made = _made(settings, allow)

    def factor(step: int) -> float:
        value = made(step)
        number = _number(value)
        if number is None:
            raise RunError(f"step {step + 1}: {settings.target} gives {_refused(value)}")
        return number

    return factor


def problem(settings: Target, allow: tuple[str, ...], steps: int) -> Problem | None:
    """Return what is wrong with the schedule at one of the ``steps``, if anything.

    Raises ``RequestError`` if it cannot be built or called.
    """
    tried = range(steps - 1, -1, -ceil(steps / MOST))[::-1]
    again = tried[:: -ceil(len(tried) / AGAIN)]
    name, made, found = settings.target, _made(settings, allow), {}
    for step in tried:
        with owned(KEY, f"{name}: it cannot be called with step {step}"):
            value = made(step)
        number = _number(value)
        if number is None:
            return Problem(KEY, f"{name}: at step {step} it gives {_refused(value)}")
        if step in again:
            found[step] = number

    # a run that resumes begins with another step
    other = _made(settings, allow)
    for step in again:
        with owned(KEY, f"{name}: it cannot be called with step {step} first"):
            value = other(step)
        if _number(value) != found[step]:
            text = f"at step {step} it gives {found[step]} after the steps before it, {short(value)} without"
            return Problem(KEY, f"{name}: {text}; a run that goes on from a checkpoint begins at any step")
    return None


def _made(settings: Target, allow: tuple[str, ...]) -> Callable[[int], object]:
    with owned(KEY, f"{settings.target}: cannot be built"):
        return build(settings, allow, Callable, key=KEY)  # type: ignore[arg-type]


def _number(value: object) -> float | None:
    """Return the value as a float if it is a factor: finite and at least 0."""
    try:
        number = float(value) if isinstance(value, Real) else nan
    except OverflowError:  # an int beyond all floats
        return None
    return number if isfinite(number) and number >= 0 else None


def _refused(value: object) -> str:
    return f"{short(value)}, and a share of optim.lr is a finite number of at least 0"
