"""Hooks that tests run on a node: a slow step, a slow disk, a slow plan."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class SlowSteps:
    """Makes every step longer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step(self, _: Any) -> None:
        time.sleep(self.seconds)


class SlowDisk:
    """From step ``at`` on, what rank ``rank`` writes is on its disk only when ``until`` exists."""

    every_rank = True

    def __init__(self, rank: int, at: int, until: str) -> None:
        self.rank, self.at, self.until = rank, at, Path(until)

    def on_step(self, event: Any) -> None:
        if event.rank != self.rank or event.step != self.at:
            return
        sync = os.fsync

        def slow(fd: int) -> None:
            while not self.until.exists():
                time.sleep(0.02)
            sync(fd)

        os.fsync = slow


class SlowPlan(nn.Module):
    """Rank 0 plans first: it touches ``began`` when it begins, and its plan is ready only when ``until`` exists."""

    def __init__(self, vocab: int, dim: int, began: str, until: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)
        Path(began).touch()
        while not Path(until).exists():
            time.sleep(0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.embed(tokens)))
        return out
