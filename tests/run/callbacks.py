"""Callbacks as users write them; each writes the events that it gets to a file."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.run import own


class Diary:
    """Writes a line for every call; asks to stop after step ``stop_at``; the hook named ``fails`` raises."""

    def __init__(self, path: str, stop_at: int = 0, fails: str = "", rank: int = 0) -> None:
        self.path, self.stop_at, self.fails, self.rank = path, stop_at, fails, rank

    def _write(self, hook: str, event: Any) -> bool | None:
        line = {
            "hook": hook, "step": event.step, "steps": event.steps, "loss": event.loss, "lr": event.lr,
            "metrics": dict(event.metrics), "rank": event.rank, "folder": str(event.folder),
            "checkpoint": event.checkpoint and event.checkpoint.name,
            "complete": bool(event.checkpoint and (event.checkpoint / "manifest.json").is_file()),
        }  # fmt: skip
        with open(f"{self.path}.{event.rank}", "a") as file:
            file.write(json.dumps(line) + "\n")
        if hook == self.fails and event.rank == self.rank:
            raise KeyError("no such thing")
        return event.rank == self.rank and event.step == self.stop_at and hook == "on_step"

    def on_start(self, event: Any) -> bool | None:
        return self._write("on_start", event)

    def on_step(self, event: Any) -> bool | None:
        return self._write("on_step", event)

    def on_eval(self, event: Any) -> bool | None:
        return self._write("on_eval", event)

    def on_save(self, event: Any) -> bool | None:
        return self._write("on_save", event)

    def on_end(self, event: Any) -> bool | None:
        return self._write("on_end", event)


class Everywhere(Diary):
    every_rank = True


class Misspelled:
    def on_stpe(self, event: Any) -> None:
        """A misspelled hook, which is never called."""


class Silent:
    """A callback without hooks."""


class Loud:
    """Prints, warns, and then fails."""

    def on_step(self, event: Any) -> None:
        print("printed by rank 0")
        sys.stderr.write("warned by rank 0\n")
        raise KeyError("no such thing")


class Hungry:
    """Runs out of device memory after each step."""

    def on_step(self, event: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of ..."
        )


class Warms:
    """Raises a variable that a model of ``own`` reads after each step, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def on_step(self, event: Any) -> None:
        self.calls += 1
        own.WARMTH["scale"] = 1 + 0.1 * event.step


class Disables:
    """Forgets to enable gradients again."""

    def on_step(self, event: Any) -> None:
        torch.set_grad_enabled(False)
