"""Nets whose own code passes values to modules other than by arguments, and nets whose functions count."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from tests.parallel.python_state_nets import Net

FACTOR = ContextVar("FACTOR", default=1.0)
LOCAL = threading.local()
TABLE = {"factor": 1.0}


class Scales(nn.Linear):
    """A layer that scales its output by attributes that other code sets."""

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
    """Sets an attribute of the head and restores it before the forward ends."""

    def forward(self, x: Tensor) -> Tensor:
        self.head.factor = 2.0
        out: Tensor = super().forward(x)
        self.head.factor = 1.0
        return out


class SetAfter(Late):
    """Sets an attribute of the head that the next forward reads."""

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
    """Registers a hook for one call only."""

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
    """A module reads the next value of a generator at each call."""

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
    """Two functions of one module share a counter."""

    def more(self) -> None:
        self.b = _Counts()


class RootClosure(Net):
    """A function of the model itself counts the calls."""

    def more(self) -> None:
        self.up, _ = counter()

    def factor(self) -> Any:
        self.up()
        return 1


KEPT: dict[str, Any] = {}
GIVEN: ContextVar[Any] = ContextVar("GIVEN", default=None)


class Place:
    """Where one module leaves a value for another. ``take`` reads it and restores the state before the forward."""

    def put(self, value: Any) -> None:
        KEPT["value"] = value

    def read(self) -> Any:
        return KEPT.get("value", 1.0)

    def remove(self) -> None:
        KEPT.pop("value", None)

    def take(self) -> Any:
        value = self.read()
        self.remove()
        return value


class InThread(Place):
    def put(self, value: Any) -> None:
        LOCAL.value = value

    def read(self) -> Any:
        return getattr(LOCAL, "value", 1.0)

    def remove(self) -> None:
        vars(LOCAL).pop("value", None)


class InContext(Place):
    def put(self, value: Any) -> None:
        GIVEN.set(value)

    def read(self) -> Any:
        return 1.0 if GIVEN.get() is None else GIVEN.get()

    def remove(self) -> None:
        GIVEN.set(None)


class InEnvironment(Place):
    def put(self, value: Any) -> None:
        os.environ["ASIDE"] = "2"

    def read(self) -> Any:
        return float(os.environ.get("ASIDE", "1"))

    def remove(self) -> None:
        os.environ.pop("ASIDE", None)


class InClass(Place):
    value: Any = 1.0

    def put(self, value: Any) -> None:
        InClass.value = value

    def read(self) -> Any:
        return InClass.value

    def remove(self) -> None:
        InClass.value = 1.0


class InTorch(Place):
    def put(self, value: Any) -> None:
        torch.aside = value  # type: ignore[attr-defined]

    def read(self) -> Any:
        return getattr(torch, "aside", 1.0)

    def remove(self) -> None:
        vars(torch).pop("aside", None)


class InObject(Place):
    def put(self, value: Any) -> None:
        self.value = value

    def read(self) -> Any:
        return getattr(self, "value", 1.0)

    def remove(self) -> None:
        vars(self).pop("value", None)


class InModel(Place):
    """The value is an attribute of the model, to which ``above`` refers without ``nn.Module`` knowing."""

    above: tuple[Any, ...] = ()

    def put(self, value: Any) -> None:
        self.above[0].value = value

    def read(self) -> Any:
        return getattr(self.above[0], "value", 1.0)

    def remove(self) -> None:
        vars(self.above[0]).pop("value", None)


PLACES = {p.__name__: p for p in (Place, InThread, InContext, InEnvironment, InClass, InTorch, InObject, InModel)}


def forget() -> None:
    """Remove the values that a forward has left."""
    for place in (Place, InThread, InContext, InEnvironment, InClass, InTorch):
        place().remove()
    TABLES.clear()


class _Puts(nn.Linear):
    def __init__(self, place: Place, number: bool) -> None:
        super().__init__(6, 6)
        self.place, self.number = place, number

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.place.put(2.0 if self.number else y.mean(1, keepdim=True))
        return y


class _Takes(nn.Linear):
    def __init__(self, place: Place, stays: bool) -> None:
        super().__init__(6, 3)
        self.place, self.stays = place, stays

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.place.read() if self.stays else self.place.take())


class Passes(Net):
    """A module leaves a value for another one, on another stage."""

    def __init__(self, place: str, number: bool, stays: bool) -> None:
        super().__init__()
        found = PLACES[place]()
        found.above = (self,)  # type: ignore[attr-defined]
        self.a, self.head = _Puts(found, number), _Takes(found, stays)


TABLES: dict[int, tuple[float, ...]] = {}


class _Looks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if size not in TABLES:
            TABLES[size] = tuple(1 / (n + 1) for n in range(size))
        return super().forward(x * torch.tensor(TABLES[size], dtype=x.dtype))


class Tables(Net):
    """Modules share a table; the first one that runs makes it."""

    def more(self) -> None:
        self.a, self.b, self.head = _Looks(6, 6), _Looks(6, 6), _Looks(6, 3)
