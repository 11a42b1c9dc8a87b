"""Metrics that control training: when it stops early, and which checkpoint is the best.

Their state is part of a session's results, which every checkpoint contains: a resumed run has it, and it is
equal on all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from launcher.checkpoint import store
from launcher.errors import RunError
from launcher.runtime.training.session import Session

BEST, STOP = ("best_value", "best_step"), ("early_stop_value", "early_stop_waited")


@dataclass(frozen=True)
class Watched:
    """A monitored metric.

    ``key``: its setting. ``patience``: validations without an improvement by more than ``min_delta``.
    """

    key: str
    metric: str
    goal: Literal["min", "max"]
    min_delta: float = 0.0
    patience: int = 0

    def better(self, value: float, before: float | None) -> bool:
        """Returns true if ``value`` improves on ``before``; NaN and infinity never do."""
        if not math.isfinite(value):
            return False
        if before is None:
            return True
        gain = before - value if self.goal == "min" else value - before
        return gain > self.min_delta


def value(s: Session, watched: Watched) -> float:
    """Returns the metric after a validation. Raises ``RunError`` if it has no value."""
    number = s.results.get(watched.metric)
    if number is None:
        available = ", ".join(
            n for n in s.results if n == "loss" or (n.startswith("val_") and n != "val_step")
        )
        raise RunError(
            f"{watched.key}: {watched.metric!r} is not a metric of this run; use one of {available}"
        )
    return number


def count_validation(s: Session, watched: Watched) -> None:
    """Counts the validations since the metric was best."""
    new, (kept, waited) = value(s, watched), STOP
    if watched.better(new, s.results.get(kept)):
        s.results |= {kept: new, waited: 0}
    else:
        s.results[waited] = s.results.get(waited, 0) + 1


def out_of_patience(s: Session, watched: Watched | None) -> bool:
    """Returns true if the metric has not improved for ``patience`` validations."""
    return watched is not None and s.results.get(STOP[1], 0) >= watched.patience


def reason(s: Session, watched: Watched) -> str:
    """Explains why training stops early."""
    waited, best = int(s.results[STOP[1]]), s.results.get(STOP[0], math.nan)
    at_least = f" by more than {watched.min_delta:g}" if watched.min_delta else ""
    return f"{watched.metric} has not improved on {best:.4f}{at_least} in {waited} validations"


def is_best(s: Session, watched: Watched) -> bool:
    """Returns true, and records the metric, if it is better than ever before."""
    new, (kept, step) = value(s, watched), BEST
    if not watched.better(new, s.results.get(kept)):
        return False
    s.results |= {kept: new, step: s.step}
    return True


def forget_absent(s: Session) -> None:
    """Forgets a best checkpoint that this run does not have, because it resumed from another run."""
    step = s.results.get(BEST[1])
    if step is not None and not store.complete(store.step_folder(s.folder / "checkpoints", int(step))):
        for name in BEST:
            s.results.pop(name, None)
