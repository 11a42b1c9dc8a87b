"""Modules that read the process group or the environment, or draw from random streams other than torch's."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_world_size


class ReadsWorld(nn.Module):
    """Scales its output by what ``how`` names; like common code, it also runs in a single process."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.scale(x)

    def scale(self, x: Tensor) -> float:
        elsewhere = ("environment", "bytes", "random", "numpy", "available")
        there = self.how not in elsewhere and dist.is_initialized()
        if self.how == "size" and there:
            return get_world_size()
        if self.how == "rank" and there:
            return 1.0 + dist.get_rank()
        if self.how == "reduce" and there:
            dist.all_reduce(x.detach().clone())
        if self.how == "environment":
            return float(os.environ.get("WORLD_SIZE", "1"))
        if self.how == "bytes":
            return float(os.environb.get(b"WORLD_SIZE", b"1"))
        if self.how == "random":
            return random.random()
        if self.how == "numpy":
            return float(np.random.rand())
        return 2.0 if self.how == "available" and dist.is_available() else 1.0


class ReadsWorldAndValues(ReadsWorld):
    """Reads values of its input as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool(torch.isfinite(x).all()) else x


class ReadsWorldLate(ReadsWorld):
    """Reads the value only from its fifth call on."""

    calls = 0

    def scale(self, x: Tensor) -> float:
        self.calls += 1
        return super().scale(x) if self.calls > 4 else 1.0


class Net(nn.Module):
    def __init__(self, how: str, looks: bool = False) -> None:
        super().__init__()
        middle = ReadsWorldAndValues(how) if looks else ReadsWorld(how)
        self.a, self.middle, self.head = nn.Linear(6, 6), middle, nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.a(x))))


class LateNet(Net):
    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.middle = ReadsWorldLate(how)


class ReadsWorldInConstructor(Net):
    """The constructor reads the value, and the forward uses it."""

    def __init__(self, how: str) -> None:
        super().__init__("available")
        self.asked = ReadsWorld(how).scale(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.asked
