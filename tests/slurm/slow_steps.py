"""A callback that makes steps slow."""

from __future__ import annotations

import time


class SlowSteps:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step(self, *_: object) -> None:
        time.sleep(self.seconds)
