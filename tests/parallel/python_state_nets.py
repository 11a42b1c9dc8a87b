"""Nets that keep numbers in Python, and the modules that read them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CALLS = 0


class Box:
    def __init__(self) -> None:
        self.steps = [0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.more()

    def more(self) -> None:
        """Make the part that is unusual."""

    def factor(self) -> Any:
        return 1

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)) * self.factor())


class Table(Net):
    """A numpy table whose values decay."""

    def more(self) -> None:
        self.table = np.ones(6)

    def factor(self) -> Any:
        self.table *= 0.9
        return torch.tensor(float(self.table.shape[0]))


class Nested(Net):
    """A count in a nested object changes the result after some calls."""

    def more(self) -> None:
        self.box = Box()

    def factor(self) -> Any:
        self.box.steps[0] += 1
        return 2 if self.box.steps[0] > 5 else 1


class Cycle(Net):
    """An iterator cycles through factors."""

    def more(self) -> None:
        self.turn = itertools.cycle([1, 1, 1, 1, 1, 2])

    def factor(self) -> Any:
        return next(self.turn)


class Generated(Net):
    """A generator, which cannot be copied."""

    def more(self) -> None:
        self.turn = (1 for _ in itertools.count())

    def factor(self) -> Any:
        return next(self.turn)


class Counting(nn.Linear):
    def __init__(self, looks: bool = False) -> None:
        super().__init__(6, 6)
        self.calls, self.looks = 0, looks

    def forward(self, x: Tensor) -> Tensor:
        if self.looks and x.sum() > 1e9:
            return x
        self.calls += 1
        return super().forward(x)


class CountRead(Net):
    """The glue reads a module's counter."""

    def more(self) -> None:
        self.b = Counting()

    def factor(self) -> Any:
        return 2 if self.b.calls > 5 else 1


class CountOfLookingRead(CountRead):
    """The glue reads the counter of a module that looks at data, of which a copy runs."""

    def more(self) -> None:
        self.b = Counting(looks=True)


class Reader(nn.Linear):
    def __init__(self, other: Counting) -> None:
        super().__init__(6, 3)
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.others[0].calls > 5 else 1)


class CountReadByModule(CountRead):
    """Another module reads the counter."""

    def more(self) -> None:
        self.b = Counting()
        self.head = Reader(self.b)

    def factor(self) -> Any:
        return 1


class CountedAlone(CountRead):
    """Only the module itself reads its counter."""

    def factor(self) -> Any:
        return 1


class Sharing(nn.Linear):
    def __init__(self, out: int, box: Box) -> None:
        super().__init__(6, out)
        self.box = box

    def forward(self, x: Tensor) -> Tensor:
        self.box.steps[0] += 1
        return super().forward(x) * self.box.steps[0]


class Shared(Net):
    """Two modules count in one shared object."""

    def more(self) -> None:
        box = Box()
        self.b, self.head = Sharing(6, box), Sharing(3, box)


STREAMS: dict[str, Callable[[], Any]] = {
    "random": lambda: random.Random(1),
    "numpy": lambda: np.random.default_rng(1),
    "old numpy": lambda: np.random.RandomState(1),
    "torch": lambda: torch.Generator().manual_seed(1),
    "array": lambda: np.zeros(1),
    "iterator": lambda: itertools.count(1),
}


class Drawing(nn.Linear):
    """Draws its next factor from a stream."""

    def __init__(self, out: int, stream: Any) -> None:
        super().__init__(6, out)
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor()

    def factor(self) -> float:
        if isinstance(self.stream, torch.Generator):
            return float(torch.rand((), generator=self.stream, device="cpu"))
        if isinstance(self.stream, np.ndarray):
            self.stream += 1
            return 1 / float(self.stream[0])
        if isinstance(self.stream, itertools.count):
            return 1 / next(self.stream)
        return float(self.stream.random() if hasattr(self.stream, "random") else self.stream.rand())


class Streams(Net):
    """Two modules draw, each from its own stream, or from one stream if ``share``."""

    def __init__(self, kind: str, share: bool) -> None:
        self.kind, self.share = kind, share
        super().__init__()

    def more(self) -> None:
        one = STREAMS[self.kind]()
        self.b, self.head = Drawing(6, one), Drawing(3, one if self.share else STREAMS[self.kind]())


class GlobalCount(Net):
    """A global variable counts."""

    def factor(self) -> Any:
        global CALLS
        CALLS += 1
        return 2 if CALLS > 20 else 1


class Numbered(nn.Linear):
    made = 0

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.number = Numbered.made
        Numbered.made += 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.number + 1)


class ByNumber(Net):
    """Each module knows how many of its class existed before it."""

    def more(self) -> None:
        self.a, self.b = Numbered(), Numbered()


class LooksAround(nn.Module):
    """Looks at data and contains a net whose copying reads its Python state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        out: Tensor = self.net(x.unsqueeze(1))[0].squeeze(1)
        return out


class Recurrent(Net):
    """A module that looks at data and contains a recurrent net."""

    def more(self) -> None:
        self.b = LooksAround()
