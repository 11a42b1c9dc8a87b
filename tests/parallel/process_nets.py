"""Models that keep a number in their process, or read one from it."""

from __future__ import annotations

import os
import time
import uuid
from os import getpid

import torch
from torch import Tensor, nn

COUNTED = "TESTS_PROCESS_NETS_CALLS"


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        calls = int(os.environ.get(COUNTED, "0"))
        os.environ[COUNTED] = str(calls + 1)
        return self.lin(x) * (1 + 0.1 * calls)


class Net(nn.Module):
    """A module that counts its calls in the environment."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.middle, self.head = nn.Linear(6, 6), _Counts(), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.a(x))))


class Asks(nn.Module):
    """Multiplies by the answer of an outside function, or only reads the answer (``unused``)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))) * (1 + self.answer()))

    def answer(self) -> float:
        if self.how == "clock":
            return time.time() % 7
        if self.how == "process":
            return getpid() % 97
        if self.how == "identifier":
            return uuid.uuid4().int % 97
        if self.how == "system":
            return ord(os.urandom(1))
        began = time.perf_counter()
        known = getpid(), uuid.uuid4()
        return 0.0 if time.perf_counter() >= began and known else 1.0
