"""Modules that keep state of their batch and also read values: the reads must not hide the state."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Looks(nn.Module):
    """Subtracts a running mean of its batch; ``how`` says where it reads values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        if self.how == "before" and not bool(torch.isfinite(seen).all()):
            raise ValueError("not finite")
        out = x - self.mean.clone()
        if self.training:
            self._follow(seen)
        if self.how == "after" and not bool(torch.isfinite(seen).all()):
            raise ValueError("not finite")
        return out

    @torch.no_grad()
    def _follow(self, seen: Tensor) -> None:
        if self.how == "number":
            self.mean.mul_(0.9).add_(0.1 * float(seen.mean()))
        elif self.how == "branch":
            if seen.mean() > 0:
                self.mean.add_(0.1)
        elif self.how == "nonzero":
            for place in (seen > 0).any(0).nonzero():
                self.mean[place] += 0.1
        elif self.how == "size":
            self.mean.add_(0.1 * len(seen[:, 0].unique()))
        elif self.how == "rebound":
            self.mean = 0.9 * self.mean + 0.1 * float(seen.mean())
        else:
            self.mean.mul_(0.9).add_(seen.mean(0), alpha=0.1)


class Inside(nn.Module):
    """A submodule reads a value and returns it as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.size = Size()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean.clone()
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * self.size(x.detach()))
        return out


class Size(nn.Module):
    def forward(self, x: Tensor) -> float:
        return float(x.abs().max())


class Replaced(nn.Module):
    """Its weight gets new memory in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.lin.weight.data = self.lin.weight.data * 0.9
        return self.lin(x)


class Columns(nn.Module):
    """Widens some columns of its input, those that a tensor of the constructor marks (as TabNet's embedding)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        marks = torch.tensor([True, True, False, True, False, False])
        if how == "attribute":
            self.marks = marks
        else:
            self.register_buffer("marks", marks)
        if how == "memory":  # such a constructor is not recorded
            assert marks.data_ptr() != 0
        self.wide = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        columns = [x[:, i, None] if mark else self.wide(x[:, i, None]) for i, mark in enumerate(self.marks)]
        return torch.cat(columns, 1)


class Table(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.columns = Columns(how)
        self.a = nn.Linear(9, 8)
        self.b = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.columns(x))))
