"""State outside of modules: of a file, a thread, a context, the main program; and generators that are kept."""

from __future__ import annotations

import sys
import threading
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from tests.parity.zoo.case import ABCD, D, Net, block, odd, sequence, tokens

CALLS: ContextVar[int] = ContextVar("calls")


class _Counts(nn.Module):
    """A layer that is scaled by a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x) * (1 + 0.1 * self.count())
        return out

    def count(self) -> int:
        raise NotImplementedError


class _InContext(_Counts):
    def count(self) -> int:
        CALLS.set(CALLS.get(0) + 1)
        return CALLS.get()


class _OnThread(_Counts):
    def count(self) -> int:
        thread = threading.current_thread()
        thread.zoo_calls = getattr(thread, "zoo_calls", 0) + 1  # type: ignore[attr-defined]
        return int(thread.zoo_calls)  # type: ignore[attr-defined]


class _InMain(_Counts):
    def count(self) -> int:
        main = sys.modules["__main__"]
        main.zoo_calls = getattr(main, "zoo_calls", 0) + 1  # type: ignore[attr-defined]
        return int(main.zoo_calls)


@odd(*ABCD)
class ContextCount(Net):
    """A context variable that has no value at first counts the calls of a block."""

    def extra(self) -> None:
        self.b = _InContext()


@odd(*ABCD)
class ThreadCount(Net):
    """An attribute of the thread counts the calls of a block."""

    def extra(self) -> None:
        self.b = _OnThread()


@odd(*ABCD)
class MainCount(Net):
    """A variable of the main program counts the calls of a block."""

    def extra(self) -> None:
        self.b = _InMain()


TABLES: dict[int, Tensor] = {}


def _positions(length: int) -> Tensor:
    if length not in TABLES:
        places = torch.arange(length, dtype=torch.float64)[:, None]
        TABLES[length] = torch.sin(places / 100 ** (torch.arange(D, dtype=torch.float64) / D))
    return TABLES[length]


@tokens("embed", "b", "c", "head")
class TableOfFile(nn.Module):
    """A table of positions that a function stores in a global dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.b, self.c, self.head = nn.Embedding(8, D), block(), block(), nn.Linear(D, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.embed(x) + _positions(6))
        out: Tensor = self.head(self.c(h + _positions(6)))
        return out


class _Features(nn.Module):
    """Attention by random features, which every third call draws anew from the module's own generator."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = nn.Linear(D, D), 0
        self.generator = torch.Generator().manual_seed(0)
        self.register_buffer("rows", self.draw())

    def draw(self) -> Tensor:
        return torch.randn(4, D, generator=self.generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            self.rows = self.draw()
        out: Tensor = self.net(x) + torch.tanh(x @ self.rows.T) @ self.rows
        return out


@odd("a", "features", "c", "d")
class RedrawnFeatures(Net):
    """Random features from a generator from which the constructor has drawn, drawn again at every third call."""

    def extra(self) -> None:
        self.features = _Features()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.features(self.a(x))))  # type: ignore[no-any-return]


class _Memory(nn.Module):
    """A matrix that lasts for one forward."""

    start: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("start", torch.linspace(-1, 1, 4 * D, dtype=torch.float64).view(4, D))

    def reset(self, samples: int) -> None:
        self.rows = self.start.expand(samples, 4, D)


class _Writes(nn.Module):
    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self.memory, self.net = memory, nn.Linear(D, D + 4)

    def forward(self, h: Tensor) -> None:
        value, key = self.net(h).split([D, 4], -1)
        self.memory.rows = self.memory.rows + key.softmax(-1).unsqueeze(-1) * value.unsqueeze(1)


class _Reads(nn.Module):
    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self.memory, self.net = memory, nn.Linear(D, 4)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = (self.net(h).softmax(-1).unsqueeze(1) @ self.memory.rows).squeeze(1)
        return out


@sequence("control", "write", "read", "head")
class TuringMachine(nn.Module):
    """Heads share a memory: one writes to it and returns nothing, and the other reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = _Memory()
        self.control, self.head = nn.GRUCell(D, D), nn.Linear(2 * D, 8)
        self.write, self.read = _Writes(self.memory), _Reads(self.memory)

    def forward(self, x: Tensor) -> Tensor:
        self.memory.reset(len(x))
        h, out = x.new_zeros(len(x), D), []
        for t in range(x.shape[1]):
            h = self.control(x[:, t], h)
            self.write(h)
            out.append(self.head(torch.cat([h, self.read(h)], -1)))
        return torch.stack(out, 1)
