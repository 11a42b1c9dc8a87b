"""Modules that remember state outside parameters and persistent buffers, and use it in the next forward."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

LOG: list[int] = []


class Remembers(nn.Module):
    """Remembers a value of ``kind``, under the name ``kept``."""

    calls = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.lin = nn.Linear(6, 6)
        start: dict[str, Any] = {
            "number": 0, "list": [], "deque": deque(maxlen=3), "array": np.ones(2), "python": random.Random(0),
            "numpy": np.random.default_rng(0), "torch": torch.Generator().manual_seed(0), "cache": None, "unread": 0,
            "mean": 1.0, "seen": [], "shaped": torch.Generator().manual_seed(0), "calls": None, "log": None,
        }  # fmt: skip
        if kind == "buffer":
            self.register_buffer("kept", torch.ones(()), persistent=False)
        else:
            self.kept = start[kind]

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.lin(x))
        return out * self.scale(x.detach()) if self.training else out

    def scale(self, x: Tensor) -> Any:
        if self.kind == "unread":
            self.kept = len(x)
            return 1.0
        if self.kind == "cache":
            if self.kept is None:
                self.kept = 2.0
            return self.kept
        if self.kind == "python":
            return self.kept.random()
        if self.kind == "numpy":
            return float(self.kept.random())
        if self.kind == "torch":
            return torch.rand((), generator=self.kept, device="cpu").item()
        return self.counted(x)

    def counted(self, x: Tensor) -> Any:
        if self.kind == "shaped":
            return torch.rand(x.shape, generator=self.kept)
        if self.kind == "calls":
            Remembers.calls += 1
            return self.calls
        if self.kind == "log":
            LOG.append(len(LOG))
            return 1.0
        if self.kind == "number":
            self.kept += 1
            return self.kept
        if self.kind in ("list", "deque"):
            self.kept.append(1 + len(self.kept) % 3)
            return sum(self.kept)
        if self.kind == "array":
            self.kept *= 0.9
            return float(self.kept.sum())
        if self.kind == "mean":
            self.kept = 0.5 * self.kept + 0.5 * float(x.abs().mean())
            return self.kept
        if self.kind == "seen":
            self.kept.append(float(x.abs().max()))
            return sum(self.kept[-3:])
        self.kept = self.kept * 0.9
        return self.kept


class Told(Remembers):
    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Forgets(Told):
    """Returns its state, and does not restore it."""

    def set_extra_state(self, state: Any) -> None:
        pass


class OnWeight(nn.Module):
    """Counts in an attribute of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        calls = getattr(self.weight, "calls", 0)
        self.weight.calls = calls + 1  # type: ignore[attr-defined]
        return x * self.weight * (1 + 0.1 * calls)


class CountsOnWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.middle, self.head = nn.Linear(6, 6), OnWeight(), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.a(x)))
        return out


class Reversing(torch.autograd.Function):
    """Returns the negative gradient, or one that grows with the number of backwards of its module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.module.calls += 1
        return -grad * (ctx.module.calls if ctx.module.reads else 1), None


class Reverses(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.calls, self.reads = 0, reads

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Reversing.apply(x, self)
        return out


class CountsBackwards(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.a, self.middle, self.head = nn.Linear(6, 6), Reverses(reads), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.a(x)))
        return out


class Net(nn.Module):
    def __init__(self, kind: str, told: bool = False, forgets: bool = False) -> None:
        super().__init__()
        made = Forgets if forgets else Told if told else Remembers
        self.a, self.middle, self.head = nn.Linear(6, 6), made(kind), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.a(x))))


class HookedForAll(nn.Module):
    """Its constructor registers a hook for all modules of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 5)
        register_module_forward_hook(lambda m, given, out: out * 1.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x))
