"""State that a forward changes: counters, teachers, running means, caches, random numbers."""

from __future__ import annotations

import random
from functools import lru_cache

import torch
from torch import Tensor, nn

from tests.parity.zoo.case import ABCD, D, Net, block, odd


@odd(*ABCD)
class TeacherInGlue(Net):
    """A teacher that follows a layer under no_grad in the glue, and whose output is added."""

    def extra(self) -> None:
        self.teacher = nn.Linear(D, D).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.a[0].weight, 0.1)
        h = self.a(x) + self.teacher(x)
        return self.d(self.c(self.b(h)))


@odd(*ABCD)
class TeacherByData(Net):
    """A teacher that follows a layer by ``.data`` in the glue, used at the end."""

    def extra(self) -> None:
        self.teacher = nn.Linear(D, D).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.weight.data.mul_(0.9).add_(self.d.weight.data, alpha=0.1)
        h = self.c(self.b(self.a(x)))
        return self.d(h) + self.teacher(h)


class _Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.teacher = block(), block().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)
        return self.net(x) - self.teacher(x)


@odd("a", "student", "c", "d")
class TeacherInModule(Net):
    """A module with its own teacher inside."""

    def extra(self) -> None:
        self.student = _Student()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.student(self.a(x))))


@odd(*ABCD)
class Annealed(Net):
    """A number of the root decreases with every call."""

    def extra(self) -> None:
        self.temperature = 2.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)) * self.temperature
        self.temperature *= 0.9
        return self.d(self.c(h) / self.temperature)


@odd(*ABCD)
class AnnealedByBuffer(Net):
    """The glue divides by a buffer that counts the calls."""

    def extra(self) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.b(self.a(x)) / self.calls
        return self.d(self.c(h))


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = block(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * (1 + 0.1 * self.calls)


@odd("counts", "b", "c", "d")
class CountsInside(Net):
    """A module that counts its calls and scales by them."""

    def extra(self) -> None:
        self.counts = _Counts()
        del self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.counts(x))))


@odd("counts", "b", "c", "d")
class CountReadLate(CountsInside):
    """The glue reads an early module's count at the end."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.b(self.counts(x)))
        return self.d(h) * (1 + 0.1 * self.counts.calls)


@odd(*ABCD)
class RandomScale(Net):
    """random.random() scales a value and is divided out later, so the result does not change."""

    def forward(self, x: Tensor) -> Tensor:
        r = 0.5 + random.random()
        h = self.b(self.a(x) * r / r)
        g = self.c(h) * r
        return self.d(g / r)


@odd(*ABCD)
class TorchRandomScale(Net):
    """torch.rand in the glue scales a value and is divided out later."""

    def forward(self, x: Tensor) -> Tensor:
        r = 0.5 + torch.rand(len(x), 1, dtype=x.dtype)
        h = self.b(self.a(x)) * r
        return self.d(self.c(h / r) * r / r)


@odd(*ABCD)
class OwnGenerator(Net):
    """Noise from a generator that is seeded in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(1, D, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
        return self.d(self.c(self.b(self.a(x)) + noise))


class _Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.mean: Tensor
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return (x - self.mean) * self.gain


@odd("a", "running", "c", "d")
class RunningMean(Net):
    """A module updates a running mean in place."""

    def extra(self) -> None:
        self.running = _Running()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.running(self.a(x))))


class _Rebound(_Running):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return (x - self.mean) * self.gain


@odd("a", "running", "c", "d")
class RunningMeanRebound(RunningMean):
    """A module replaces the buffer of its running mean by a new tensor."""

    def extra(self) -> None:
        self.running = _Rebound()
        del self.b


@odd(*ABCD)
class RunningMeanInGlue(Net):
    """A running mean on the root, updated in the glue."""

    def extra(self) -> None:
        self.register_buffer("mean", torch.zeros(D))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.d(self.c(h - self.mean))


class _Reads(nn.Module):
    def __init__(self, shared: _Running) -> None:
        super().__init__()
        self.net = block()
        self.register_buffer("mean", shared.mean)
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.mean)


@odd("a", "running", "c", "reads", "d")
class SharedBuffer(Net):
    """A buffer that one module changes and a later one reads."""

    def extra(self) -> None:
        self.running = _Running()
        self.reads = _Reads(self.running)
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.reads(self.c(self.running(self.a(x)))))


class _Leaves(nn.Module):
    loss: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        self.loss = out.square().mean()
        return out


@odd("a", "leaves", "c", "d")
class AuxiliaryLoss(Net):
    """A module keeps an auxiliary loss, which the glue reads at the end."""

    def extra(self) -> None:
        self.leaves = _Leaves()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        h = self.d(self.c(self.leaves(self.a(x))))
        return h * (1 + self.leaves.loss)


class _Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, D, dtype=x.dtype)
        return self.net(x + self.table)


@odd("a", "cached", "c", "d")
class CachedTable(Net):
    """A module keeps a table that it makes at its first call."""

    def extra(self) -> None:
        self.cached = _Cached()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.cached(self.a(x))))


@lru_cache
def _table(n: int) -> Tensor:
    return torch.linspace(0, 1, n, dtype=torch.float64)


@odd(*ABCD)
class LruCache(Net):
    """A table that lru_cache keeps between calls, in the glue."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x) + _table(x.shape[-1]))
        return self.d(self.c(h + _table(x.shape[-1])))


class _Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + _table(x.shape[-1]))


@odd("a", "held", "c", "d")
class LruCacheInModule(Net):
    """A table that lru_cache keeps between calls, in a module."""

    def extra(self) -> None:
        self.held = _Looked()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.held(self.a(x))))


@odd(*ABCD)
class KeepsLast(Net):
    """The root keeps its last hidden value, detached, and adds its mean at the next call."""

    def extra(self) -> None:
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        out = h if self.last is None else h + self.last.mean()
        self.last = h.detach()
        return self.d(self.c(out))
