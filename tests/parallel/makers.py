"""Constructors as users write them: each makes its numbers in another way."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Maker(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * next(p for p in self.parameters() if p.requires_grad).sum()


class Inits(Maker):
    """Functions of nn.init with different distributions."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("normal", "uniform", "xavier", "kaiming_u", "kaiming_n", "orthogonal", "trunc", "sparse", "eye"):
            self.register_parameter(name, nn.Parameter(torch.empty(40, 60)))
        self.dirac = nn.Parameter(torch.empty(6, 6, 3))
        nn.init.normal_(self.normal, 1.0, 0.5)
        nn.init.uniform_(self.uniform, -1, 3)
        nn.init.xavier_normal_(self.xavier)
        nn.init.kaiming_uniform_(self.kaiming_u, a=math.sqrt(5))
        nn.init.kaiming_normal_(self.kaiming_n, mode="fan_out", nonlinearity="relu")
        nn.init.orthogonal_(self.orthogonal)
        nn.init.trunc_normal_(self.trunc, std=0.5, a=-0.5, b=0.5)
        nn.init.sparse_(self.sparse, 0.5)
        nn.init.eye_(self.eye)
        nn.init.dirac_(self.dirac)


class Constants(Maker):
    """Constant values."""

    def __init__(self) -> None:
        super().__init__()
        self.written = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.filled = nn.Parameter(torch.full((3, 4), 0.25))
        self.array = nn.Parameter(torch.tensor(np.arange(6.0).reshape(2, 3)))
        self.part = nn.Parameter(torch.zeros(4, 4))
        with torch.no_grad():
            self.part[1:3, 2] = 7.0
        self.swapped = nn.Parameter(torch.randn(3, 3))
        self.swapped.data = torch.eye(3) * 3
        self.register_buffer("steps", torch.linspace(0, 1, 5))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool(), persistent=False)
        self.plain = torch.arange(4)


class Applied(Maker):
    """Standard layers, and then a user's own initialization for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 20, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        self.conv, self.norm, self.rnn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LSTM(20, 10)
        self.head = nn.Linear(20, 50, bias=False)
        self.apply(self._init)
        self.head.weight = self.embed.weight

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3 / math.sqrt(module.in_features))


class Copied(Maker):
    """A target network that starts as a copy of the online one."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(20, 30)
        self.target = copy.deepcopy(self.online)
        both = torch.randn(10, 4)
        self.left, self.right = nn.Parameter(both[:5].clone()), nn.Parameter(both[:5] * 2)


class Looking(Maker):
    """Reads numbers that are not random: drop rates from ``linspace``."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 3)] + torch.linspace(0.2, 0.3, 2).tolist()
        self.w = nn.Parameter(torch.randn(5, 5) * self.rates[-1])


class OnCpu(Maker):
    """Old constructors that put tensors on the CPU whatever the default device is."""

    def __init__(self) -> None:
        super().__init__()
        self.old, self.older = nn.Parameter(torch.Tensor(20, 30)), nn.Parameter(torch.FloatTensor(30))
        nn.init.normal_(self.old)
        self.older.data.zero_()
        self.named = nn.Parameter(torch.randn(20, 30, device="cpu"))


class Generators(Maker):
    """Draws from its own generator."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.a, self.b = nn.Parameter(torch.randn(20, 30, generator=g)), nn.Parameter(torch.empty(20, 30))
        nn.init.normal_(self.b, generator=g)


class KeepsGenerators(Maker):
    """Draws from generators that it keeps, two of which are seeded alike, and one like the run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.Generator().manual_seed(3) for _ in range(2))
        self.third, self.unused = (torch.Generator().manual_seed(0) for _ in range(2))
        self.a, self.b = torch.randn(20, 30, generator=self.first), torch.randn(7, generator=self.second)
        self.register_buffer("c", torch.randn(4, generator=self.first))
        self.register_buffer("d", torch.rand(5, generator=self.third))


class OwnApply(Maker):
    """Counts the calls of ``_apply``, and has a layer of torch with its own one."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.lstm, self.calls = nn.Linear(3, 4), nn.LSTM(3, 4), 0

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.calls += 1
        return self


class FromNumpy(Maker):
    """Values that numpy made."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.from_numpy(np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)))
        self.w = nn.Parameter(torch.randn(8, 3))


class RandomLook(Maker):
    """Reads a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4) * (1 if torch.rand(1).item() > 0.5 else 2))


class Parametrized(Maker):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.spectral = nn.Linear(4, 6), nn.Linear(4, 6)
        nn.utils.parametrizations.weight_norm(self.weight)
        nn.utils.parametrizations.spectral_norm(self.spectral)


class Orthogonal(Maker):
    """Its constructor tests whether random numbers are already orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(4, 4)
        nn.utils.parametrizations.orthogonal(self.turn)


class Wide(nn.Module):
    """``layers`` layers of 16 MB each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
