"""Modules whose tensors are referenced from elsewhere, or share memory with each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm  # type: ignore[attr-defined]

KEPT: dict[str, Any] = {}
TABLES: dict[int, Tensor] = {}


class Net(nn.Module):
    """Two layers around a module that keeps a reference."""

    def __init__(self, middle: str, **settings: Any) -> None:
        super().__init__()
        self.a, self.middle, self.head = nn.Linear(6, 6), globals()[middle](**settings), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.a(x)))))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


@dataclass
class Holder:
    value: Any


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def closure(w: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x @ w


WAYS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda w: {"w": [w]},
    "set": lambda w: {w},
    "key": lambda w: {w: 1},
    "dataclass": Holder,
    "slots": Slotted,
    "namespace": lambda w: SimpleNamespace(w=w),
    "closure": closure,
    "partial": lambda w: partial(torch.matmul, other=w),
    "method": lambda w: w.t,
}


class Held(Odd):
    """Keeps a second reference to its own weight, in the way that ``way`` names."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.kept = WAYS[way](self.lin.weight)


class Array(Odd):
    """Keeps a list with a numpy array that shares the weight's memory, or with a copy.

    ``in_memory``: its constructor needs a plain build, so it is not recorded.
    """

    def __init__(self, copied: bool = False, in_memory: bool = False) -> None:
        super().__init__()
        array = self.lin.weight.detach().numpy()
        self.seen = [array.copy() if copied else array[1:]]
        if in_memory:
            self.lin.weight.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * (1 + float(self.seen[0].mean()))


class Hooked(Odd):
    """A forward hook closes over the weight."""

    def __init__(self) -> None:
        super().__init__()
        w = self.lin.weight
        self.register_forward_hook(lambda m, args, out: out + w.sum())


class Registered(Odd):
    """A dictionary of the file refers to the weight."""

    def __init__(self) -> None:
        super().__init__()
        KEPT["w"] = self.lin.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + KEPT["w"].sum()


class Hidden(Odd):
    """Refers to a module that is not registered in the model."""

    def __init__(self, way: str = "dict") -> None:
        super().__init__()
        self.kept = WAYS[way](nn.Linear(6, 6))


class Stateless(Odd):
    """Refers to a module without tensors, and to one of its own modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [nn.Tanh(), self.lin]


class Prior(Odd):
    """A distribution that the constructor makes."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = torch.distributions.Normal(torch.zeros(6), torch.ones(6), validate_args=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.prior.mean


class Flat(Odd):
    """A view of a parameter, taken in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(36))
        self.square = self.flat.view(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) @ self.square


class Scaled(Odd):
    """A tensor that the constructor computed from a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = self.lin.weight * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) @ self.twice


class Twice(Odd):
    """Two parameters that share memory."""

    def __init__(self, parts: bool = False) -> None:
        super().__init__()
        both = torch.randn(6, 12) if parts else torch.randn(6, 6)
        self.p, self.q = map(nn.Parameter, both.chunk(2, 1)) if parts else (nn.Parameter(both), nn.Parameter(both))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.p + x @ self.q


class Follows(Odd):
    """A buffer that shares a weight's memory."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("same", self.lin.weight.data, persistent=persistent)
        self.same: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) @ self.same


class Buffers(Odd):
    """A buffer that is a view of another one; ``changes``: the forward changes it."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.register_buffer("both", torch.zeros(2, 6))
        self.both: Tensor
        self.register_buffer("first", self.both[0])
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            self.both.add_(0.1)
        return self.lin(x) + self.first


class Marked(Odd):
    """A weight with an attribute."""

    def __init__(self, reads: bool, buffer: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(6))
        t = self.table if buffer else self.lin.weight
        t.scale = 0.5  # type: ignore[attr-defined, union-attr]
        self.reads, self.buffer = reads, buffer

    def forward(self, x: Tensor) -> Tensor:
        t = self.table if self.buffer else self.lin.weight
        return self.lin(x) * (getattr(t, "scale", 1.0) if self.reads else 1.0)


class Weight(nn.Parameter):
    """A subclass of ``nn.Parameter``."""


class Kind(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.lin.weight = Weight(torch.randn(6, 6))


@lru_cache
def table(n: int) -> Tensor:
    return torch.linspace(0, 1, n)


class Cached(Odd):
    """A table that is computed once; ``early``: in the constructor, otherwise in the forward."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        if early:
            self.register_buffer("early", table(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + table(6)


class Global(Odd):
    """A table in a dictionary of the file; ``early``: the constructor makes it."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        TABLES.clear()
        if early:
            TABLES[6] = torch.linspace(0, 1, 6)

    def forward(self, x: Tensor) -> Tensor:
        if 6 not in TABLES:
            TABLES[6] = torch.linspace(0, 1, 6)
        return self.lin(x) + TABLES[6]


class Made(Odd):
    """Tensors of constants that the forward makes."""

    def forward(self, x: Tensor) -> Tensor:
        row = torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
        return self.lin(x * row) + x.new_tensor([1.0]) * torch.as_tensor(2.0)


class Normed(Odd):
    """Attributes that hooks recompute at each call, one of them in a weight's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = spectral_norm(nn.Linear(6, 6))


class Recurrent(nn.Module):
    """torch's LSTM, which keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x[:, None])[0][:, 0]


class Tied(Odd):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 6)
        self.other.weight = self.lin.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.lin(x))


class Scripted(nn.Module):
    """A layer that TorchScript has compiled."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated but still in use
            self.lin = torch.jit.script(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Pruned(Odd):
    """torch's pruning: a hook that applies a mask."""

    def __init__(self) -> None:
        super().__init__()
        prune.custom_from_mask(self.lin, "weight", torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)
