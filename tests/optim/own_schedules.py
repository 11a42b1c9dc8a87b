"""Learning-rate schedules as users write them: correct ones, and ones with a fault that makes them unusable."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import ClassVar

import numpy as np


class InverseRoot:
    """Rises in ``warmup`` steps, then falls with the square root of the step."""

    def __init__(self, warmup: int = 2) -> None:
        self.warmup = warmup

    def __call__(self, step: int) -> float:
        return min((step + 1) / self.warmup, (self.warmup / (step + 1)) ** 0.5)


class Both:
    """One schedule up to a step, and zero after it."""

    def __init__(self, first: InverseRoot, at: int) -> None:
        self.first, self.at = first, at

    def __call__(self, step: int) -> float:
        return self.first(step) if step < self.at else 0.0


class Numbers:
    """Returns numbers of every type."""

    def __call__(self, step: int) -> object:
        return (1, 0.5, np.float64(0.25), np.float32(0.125), np.int64(2), Fraction(1, 16), 0)[step % 7]


def function(step: int) -> float:
    return 1.0


class NotCalled:
    pass


class Unbuilt:
    def __init__(self) -> None:
        raise ValueError("no such shape")

    def __call__(self, step: int) -> float:
        return 1.0


class Leaves:
    def __call__(self, step: int) -> float:
        raise SystemExit("enough")


class Table:
    """A table that has a rate for its own steps only."""

    def __init__(self, rates: list[float]) -> None:
        self.rates = rates

    def __call__(self, step: int) -> float:
        return self.rates[step]


class Gives:
    """Returns 1, and at one step another value."""

    def __init__(self, value: str, at: int = 2) -> None:
        self.value, self.at = eval(value, {"np": np}), at

    def __call__(self, step: int) -> object:
        return self.value if step == self.at else 1.0


class Counts:
    """Counts its calls and does not read the step."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / self.calls


class InOrder:
    """Fails unless it is called with step 0 first."""

    def __call__(self, step: int) -> float:
        if step == 0:
            self.start = 1.0
        return self.start / (step + 1)


class Noise:
    def __call__(self, step: int) -> float:
        return random.random()


class Ends:
    """Returns a negative rate after some steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, step: int) -> float:
        return 1.0 if step < self.after else -1.0


class Cached:
    """Divides by the number of steps that it was called for, in a dictionary of the class."""

    known: ClassVar[dict[int, float]] = {}

    def __call__(self, step: int) -> float:
        if step not in Cached.known:
            Cached.known[step] = 1 / (len(Cached.known) + 1)
        return Cached.known[step]
