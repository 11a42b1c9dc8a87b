"""Nets whose own code tells its modules something past their arguments, and functions that count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from tests.parallel.python_state_nets import Net

FACTOR = ContextVar("FACTOR", default=1.0)
LOCAL = threading.local()
TABLE = {"factor": 1.0}


class Scales(nn.Linear):
    """By what others have put on it."""

    factor: Any = 1.0
    read: Callable[[], float] = staticmethod(lambda: 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor * self.read()


class Late(Net):
    def more(self) -> None:
        self.head = Scales(6, 3)


class Attribute(Late):
    def factor(self) -> Any:
        self.head.factor = 2.0
        return 1


class Toggled(Late):
    """It is as before when the forward is over."""

    def forward(self, x: Tensor) -> Tensor:
        self.head.factor = 2.0
        out: Tensor = super().forward(x)
        self.head.factor = 1.0
        return out


class SetAfter(Late):
    """For the next forward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        self.head.factor = 0.5
        return out


class TensorLaid(Late):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.head.factor = h.mean()
        out: Tensor = self.head(self.b(h))
        self.head.factor = 1.0
        return out


class Hooked(Late):
    """A hook for one call."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        handle = self.head.register_forward_hook(lambda m, args, out: out * 2)
        out: Tensor = self.head(h)
        handle.remove()
        return out


class Global(Late):
    def more(self) -> None:
        super().more()
        self.head.read = _of_table

    def forward(self, x: Tensor) -> Tensor:
        TABLE["factor"] = 2.0
        out: Tensor = super().forward(x)
        TABLE["factor"] = 1.0
        return out


def _of_table() -> float:
    return TABLE["factor"]


class Context(Late):
    def more(self) -> None:
        super().more()
        self.head.read = FACTOR.get

    def forward(self, x: Tensor) -> Tensor:
        token = FACTOR.set(2.0)
        out: Tensor = super().forward(x)
        FACTOR.reset(token)
        return out


class Local(Late):
    def more(self) -> None:
        super().more()
        self.head.read = _of_thread

    def forward(self, x: Tensor) -> Tensor:
        LOCAL.factor = 2.0
        out: Tensor = super().forward(x)
        LOCAL.factor = 1.0
        return out


def _of_thread() -> float:
    return getattr(LOCAL, "factor", 1.0)


class _ByDefault(nn.Linear):
    def forward(self, x: Tensor, seen: dict[str, int] = {}) -> Tensor:  # noqa: B006
        seen["calls"] = seen.get("calls", 0) + 1
        return super().forward(x) * seen["calls"]


class Default(Net):
    """A default argument counts calls."""

    def more(self) -> None:
        self.b = _ByDefault(6, 6)


class Generated(Net):
    """A module goes on with a generator."""

    def more(self) -> None:
        self.b = Scales(6, 6)
        self.b.turn = (n for n in range(1, 1000))
        self.b.read = lambda: next(self.b.turn)


def counter() -> tuple[Callable[[], float], Callable[[], float]]:
    calls = 0

    def count() -> float:
        nonlocal calls
        calls += 1
        return 1 + 0.1 * calls

    return count, lambda: 1 / (1 + calls)


class _Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.up, self.down = counter()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.up() * self.down()


class Closures(Net):
    """Two functions of one module share a count."""

    def more(self) -> None:
        self.b = _Counts()


class RootClosure(Net):
    """A function of the model itself counts."""

    def more(self) -> None:
        self.up, _ = counter()

    def factor(self) -> Any:
        self.up()
        return 1
