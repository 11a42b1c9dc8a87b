"""Models that cannot run operator by operator because of their hooks: why, and the way out."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.plan.values.facts import Skeleton

KEY = "model"


def refused(skeleton: Skeleton) -> Iterator[Problem]:
    """Yields what the recording of a forward does not capture: hooks of parameters."""
    for name in skeleton.traits.hooked:
        text = f"the parameter {name} has hooks, and ranks of a device matrix have parts of its gradient"
        yield Problem(KEY, f"{text}; change gradients in an optimizer of your own")
