"""Modules whose next forward depends on Python's random streams and on ``get_extra_state``."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Keeps(nn.Module):
    """Its state has a value of every kind that a checkpoint can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.calls, self.means = 0, deque([1.0], maxlen=3)
        self.table: dict[Any, Any] = {"a": np.ones(3, np.float32), 2: (True, b"x", None)}
        self.seen: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.means.append(self.means[-1] * 0.9)
            self.table["a"] = self.table["a"] * np.float32(1.01)
            self.seen.add(self.calls % 5)
        scale = sum(self.means) / len(self.means) + float(self.table["a"].sum()) / (self.calls + 1) + len(self.seen)
        return torch.tanh(self.lin(x)) * scale

    def get_extra_state(self) -> Any:
        about = {"calls": self.calls, "means": self.means, "table": self.table, "seen": self.seen}
        return about | {"tensor": torch.full((2, 1), self.calls, dtype=torch.bfloat16)}

    def set_extra_state(self, state: Any) -> None:
        assert torch.equal(state.pop("tensor"), torch.full((2, 1), state["calls"], dtype=torch.bfloat16))
        for name, value in state.items():
            assert type(value) is type(getattr(self, name)), name
            setattr(self, name, value)


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.random() + float(np.random.rand())) if self.training else x


class Net(nn.Module):
    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.embed, self.keeps, self.head = nn.Embedding(64, 16), Keeps(), nn.Linear(16, 64)
        self.draws = Draws() if draws else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.draws(self.keeps(self.embed(tokens))))


class Odd(Net):
    """Returns a state that no checkpoint can hold."""

    def get_extra_state(self) -> Any:
        return {"then": random.Random(1)}
