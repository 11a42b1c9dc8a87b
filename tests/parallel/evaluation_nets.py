"""Models whose state changes in evaluation mode too, and models whose outputs are images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Layers around a module that keeps state."""

    def __init__(self, middle: str, **settings: Any) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.middle = globals()[middle](**settings)
        self.b, self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(self.middle(torch.tanh(self.a(x))))))))


class Counter(nn.Module):
    """Counts samples and calls, in a buffer, in Python and in a list, whatever the mode."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.calls = 0
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        self.calls += 1
        self.sizes.append(x.shape[0])
        return x


CALLS = 0


class Variable(nn.Module):
    """Counts calls in a global variable in both modes, and scales by the count in training."""

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return x * (1 + 0.1 * CALLS) if self.training else x


class Fading(nn.Module):
    """Divides by the number of calls so far, which it counts in Python in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        return x / self.times


class Cache(nn.Module):
    """Keeps the last activations in place, as a new tensor, and in a non-persistent buffer."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(6))
        self.register_buffer("new", torch.zeros(6))
        self.register_buffer("quiet", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.copy_(x[0])
            self.new = x.mean(0)
            if not self.training:
                self.quiet.add_(x.sum(0))
        return x


class Awake(nn.BatchNorm1d):
    """A batch norm that stays in training mode."""

    def __init__(self) -> None:
        super().__init__(6)

    def train(self, mode: bool = True) -> Awake:
        return super().train(True)


class Untracked(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(6, track_running_stats=False)


class Drifting(nn.Module):
    """Subtracts a running mean, which only forwards in evaluation mode update."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Teacher(nn.Module):
    """A slow copy that is updated in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(self.fast.weight, alpha=0.1)
        return self.fast(x) + self.slow(x)


class Rows(nn.Module):
    """A table whose rows are scaled to a maximal norm when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0].abs() * 4).long().clamp(max=7))


class Images(nn.Module):
    """Logits (samples, classes, height, width), as torch's cross entropy takes them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Returned(nn.Module):
    """Returns its logits in the form that ``how`` names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a = how, nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        logits = self.a(x)
        return {
            "tuple": (logits, x), "alone": (logits,), "dict": {"logits": logits}, "best": logits.argmax(-1),
            "flat": logits.flatten(0, 1), "tensor": logits,
        }[self.how]  # fmt: skip
