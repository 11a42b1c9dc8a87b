"""Calls of the user's own objects while a run trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from launcher.errors import RunError, of_users


@dataclass(frozen=True)
class TrainingEvent:
    """What a callback is told; to be read only.

    ``step`` counts optimizer steps done, of ``steps``. ``loss`` and ``lr`` are those of the last step on this
    start, ``None`` before it. ``metrics``: of ``on_step`` its loss, lr and grad_norm, of ``on_eval`` what the
    validation came to, else all figures so far. ``folder`` is the run's; ``checkpoint``, of ``on_save``, a
    complete one.
    """

    step: int
    steps: int
    loss: float | None
    lr: float | None
    metrics: Mapping[str, float]
    folder: Path
    rank: int
    checkpoint: Path | None = None


@dataclass
class Callbacks:
    """Those of one rank, ``each`` by what errors call it; if any rank has some, every rank has this."""

    each: Sequence[tuple[str, object]]
    steps: int
    folder: Path
    rank: int
    asked: bool = False
    _last: dict[str, float] = field(default_factory=dict)

    def call(
        self, hook: str, step: int, metrics: Mapping[str, float], checkpoint: Path | None = None
    ) -> None:
        """Call ``hook`` of all that have it, in order; ``asked``: one has answered True, to stop.

        Raises ``RunError``.
        """
        if hook == "on_step":
            self._last = dict(metrics)
        told = MappingProxyType(dict(metrics))
        event = TrainingEvent(
            step=step,
            steps=self.steps,
            loss=self._last.get("loss"),
            lr=self._last.get("lr"),
            metrics=told,
            folder=self.folder,
            rank=self.rank,
            checkpoint=checkpoint,
        )
        for name, one in self.each:
            act = getattr(one, hook, None)
            if act is None:
                continue
            try:
                answer = act(event)
            except (Exception, SystemExit) as error:  # whatever the user's code does
                raise RunError(f"{name}.{hook} failed after step {step}: {of_users(error)}") from error
            self.asked |= answer is True

    def agreed(self) -> bool:
        """Whether a callback of any rank has asked to stop. Every rank calls it."""
        asked = torch.tensor(self.asked, dtype=torch.int32)
        dist.all_reduce(asked)
        return bool(asked.item())
