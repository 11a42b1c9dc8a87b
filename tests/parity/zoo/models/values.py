"""What modules pass on: keywords, dictionaries, dataclasses, None."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.parity.zoo.case import ABCD, D, Net, block, odd


@odd(*ABCD)
class KeywordsBetween(Net):
    """Modules are called by keyword."""

    def extra(self) -> None:
        self.c = _ByKeyword()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.d(self.c(skip=x, hidden=h, scale=0.5))


class _ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, *, hidden: Tensor, skip: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.net(hidden) + skip * scale
        return out


@odd(*ABCD)
class KeywordsOnly(Net):
    """The model's forward has an input, a default and a keyword argument."""

    def forward(self, x: Tensor, scale: float = 0.5, *, extra: Tensor | None = None) -> Tensor:
        h = self.b(self.a(x)) * scale
        return self.d(self.c(h if extra is None else h + extra))


@odd(*ABCD)
class StarArguments(Net):
    """``forward(*args)``."""

    def forward(self, *xs: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(*xs))))


class _Dict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Any) -> Any:
        hidden = x["hidden"] if isinstance(x, dict) else x
        return {"hidden": self.net(hidden), "skip": hidden, "depth": 1, "none": None}


@odd("a", "p", "q", "d")
class Dictionaries(Net):
    """Modules pass on dictionaries that contain a number and None."""

    def extra(self) -> None:
        self.p, self.q = _Dict(), _Dict()
        del self.b, self.c

    def forward(self, x: Tensor) -> Tensor:
        out = self.q(self.p(self.a(x)))
        return self.d(out["hidden"] + out["skip"] * out["depth"])


@dataclass
class _State:
    hidden: Tensor
    skip: Tensor | None = None


class _Dataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, s: _State) -> _State:
        return _State(self.net(s.hidden), s.hidden if s.skip is None else s.skip)


@odd("a", "p", "q", "d")
class Dataclasses(Net):
    """Modules pass on a dataclass."""

    def extra(self) -> None:
        self.p, self.q = _Dataclass(), _Dataclass()
        del self.b, self.c

    def forward(self, x: Tensor) -> Tensor:
        out = self.q(self.p(_State(self.a(x))))
        assert out.skip is not None
        return self.d(out.hidden + out.skip)


class _Pair(NamedTuple):
    first: Tensor
    second: tuple[Tensor, list[Tensor]]


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> _Pair:
        h = self.net(x)
        return _Pair(h, (h * 2, [x, h.sum(-1, keepdim=True)]))


@odd("a", "n", "c", "d")
class NestedTuples(Net):
    """A module returns a named tuple with a list in a tuple."""

    def extra(self) -> None:
        self.n = _Nested()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        first, (double, (skip, total)) = self.n(self.a(x))
        return self.d(self.c(first) + double * total + skip)


class _Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        h: Tensor = self.net(x)
        return (h if mask is None else h * mask), None


@odd("a", "o", "p", "d")
class Nones(Net):
    """Modules take None and return it."""

    def extra(self) -> None:
        self.o, self.p = _Optional(), _Optional()
        del self.b, self.c

    def forward(self, x: Tensor) -> Tensor:
        h, none = self.o(self.a(x), None)
        h, _ = self.p(h, none)
        return self.d(h)


@odd("left", "right", "c", "d", inputs=((D,), (4, D)))
class TwoInputs(nn.Module):
    """Two inputs, of which the second is also used late."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.c, self.d = block(), block(), block(), nn.Linear(D, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.left(x)[:, None] + y
        return self.d(self.c(self.right(h).mean(1)) + y[:, 0])


@odd("embed", "a", "b", "d", inputs=(("int64", 3), (D,), ("int64", 8)))
class MixedInputs(nn.Module):
    """Integer and float inputs, one of which is compared for a mask at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b, self.d = nn.Embedding(8, D), block(), block(), nn.Linear(D, D)

    def forward(self, ids: Tensor, x: Tensor, order: Tensor) -> Tensor:
        h = self.a(self.embed(ids).sum(1) + x)
        h = self.b(h.gather(1, order))
        return self.d(h * (order > 3))


@odd("a", "b", "d", inputs=(("int64", 8),))
class IntegerInput(nn.Module):
    """Integers that the glue converts to floats."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.d = block(), block(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.b(self.a(x.to(torch.get_default_dtype()) / 8)))


class _Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.net(x)
        return h, h.argmax(-1), h > 0


@odd("a", "r", "c", "d")
class IntegersBetween(Net):
    """A module returns integers and booleans beside its floats, and a late stage uses them."""

    def extra(self) -> None:
        self.r = _Returns()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        h, best, mask = self.r(self.a(x))
        h = self.c(h)
        return self.d(h * mask + torch.nn.functional.one_hot(best, D))


@odd(*ABCD)
class ManySkips(Net):
    """Every value is used by every later block."""

    def forward(self, x: Tensor) -> Tensor:
        p = self.a(x)
        q = self.b(p + x)
        r = self.c(q + p + x)
        return self.d(r + q + p + x)


@odd(*ABCD)
class UnusedValue(Net):
    """A block's result is not used."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.b(h)
        return self.d(self.c(h))


@odd(*ABCD)
class InputAtTheEnd(Net):
    """The last stage needs the input, and a late block does not depend on the first stage."""

    def forward(self, x: Tensor) -> Tensor:
        left = self.b(self.a(x))
        right = self.c(x)
        return self.d(left * right)


@odd(*ABCD)
class ScalarBetween(Net):
    """A 0-d value crosses the cut."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        total = h.square().mean()
        return self.d(self.c(self.b(h)) * total)
