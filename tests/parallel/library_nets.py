"""A model that counts its forwards in an attribute of a library."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COUNT: ContextVar[int] = ContextVar("count")


class _Counts(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * (1 + 0.1 * self.calls())

    def calls(self) -> int:
        if self.how == "dict":
            memo = torch.__dict__.setdefault("library_nets_memo", {"calls": 0})
            memo["calls"] += 1
            return int(memo["calls"])
        if self.how == "context":
            COUNT.set(COUNT.get(0) + 1)
            return COUNT.get()
        owner = self.owner()
        calls = int(getattr(owner, "library_nets_calls", 0))
        owner.library_nets_calls = calls + 1
        return calls

    def owner(self) -> Any:
        if self.how == "import":
            import sys

            assert hasattr(sys, "modules")  # refused by name, as what it keeps is
            return sys
        if self.how == "main":
            return importlib.import_module("__main__")
        if self.how == "thread":
            return threading.current_thread()
        return {"module": torch, "inner": torch.backends, "class": nn.Module, "function": F.relu}[self.how]


class Given(nn.Module):
    """Scales by the result of a function argument, whose file defines none of the model's classes."""

    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__()
        self.a, self.head, self.scale = nn.Linear(6, 6), nn.Linear(6, 5), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x))) * self.scale()


class Net(nn.Module):
    """Its middle module counts calls in an attribute of what ``how`` names, or in a dict there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.middle, self.head = nn.Linear(6, 6), _Counts(how), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.a(x))))
