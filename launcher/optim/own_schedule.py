"""A learning-rate schedule of the user's own: it is built, and tried at the steps of the run."""

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
"""Steps that are tried; of a longer training so many, evenly up to the last."""
AGAIN = 1_000
"""Steps that are tried a second time, in another order."""


def build_own(settings: Target, allow: tuple[str, ...]) -> Callable[[int], float]:
    """An instance, called with the step (from 0). Raises ``RequestError``, and ``RunError`` when called."""
    made = _made(settings, allow)

    def factor(step: int) -> float:
        value = made(step)
        number = _number(value)
        if number is None:
            raise RunError(f"step {step + 1}: {settings.target} gives {_refused(value)}")
        return number

    return factor


def problem(settings: Target, allow: tuple[str, ...], steps: int) -> Problem | None:
    """What is wrong with it at one of so many ``steps``.

    Raises ``RequestError`` where it cannot be made or called.
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

    # a run that goes on begins with another step
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
    """The value, where it is a factor."""
    try:
        number = float(value) if isinstance(value, Real) else nan
    except OverflowError:  # a whole number beyond all floats
        return None
    return number if isfinite(number) and number >= 0 else None


def _refused(value: object) -> str:
    return f"{short(value)}, and a share of optim.lr is a finite number of at least 0"
