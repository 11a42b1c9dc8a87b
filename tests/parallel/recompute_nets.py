"""Models for recomputation: several kinds of dropout, tied weights, and data that decide what runs."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.models.language_model import Attention


class Mixed(nn.Module):
    """Attention and a wide layer, with dropout as a module and as a function."""

    def __init__(self, dim: int, p: float) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(dim), Attention(dim, 2, 2, 10000.0, 0.2)
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)
        self.drop, self.p = nn.Dropout(p), p

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.attn_norm(x)))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training)


class Tied(nn.Module):
    """A small language model whose table is its head, with dropout in each block."""

    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Mixed(8, p) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Routed(nn.Module):
    """Each sample goes through one of two layers, chosen from its values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.drop = nn.Linear(8, 2), nn.Dropout(0.25)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, who = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            mine = who == n
            if mine.any():
                out[mine] = expert(self.drop(x[mine])) * weights[mine].unsqueeze(-1)
        return x + out


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Routed() for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) / self.calls


class Counting(nn.Module):
    """A module that counts its calls, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.counter, self.head = nn.Linear(6, 6), _Counter(), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.counter(self.first(x)))


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.noise = nn.Linear(6, 6), torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.empty(1, 6).bernoulli_(0.5, generator=self.noise)


class Noisy(nn.Module):
    """A module that draws from its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.noisy, self.head = nn.Linear(6, 6), _Noisy(), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.noisy(self.first(x)))


class _Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.own.weight, alpha=0.1)
        return self.own(x) - self.teacher(x)


class Taught(nn.Module):
    """A module that changes weights in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.head = _Student(), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.student(x))


class Overwriting(nn.Module):
    """A module that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.head = nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.first(x)))


class Recurrent(nn.Module):
    """A GRU, whose kernel works in place on its products."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Normalized(nn.Module):
    """Batch norms, whose running statistics a second forward would update again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class _Shifts(nn.Linear):
    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        out = super().forward(x)
        return torch.tanh(out if shift is None else out + shift)


class Signature(nn.Module):
    """The model passes a keyword if the forward of its layer has it."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(dim, dim), _Shifts(dim, dim), nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        more = {"shift": x} if "shift" in inspect.signature(self.b.forward).parameters else {}
        return self.head(self.b(h, **more))
