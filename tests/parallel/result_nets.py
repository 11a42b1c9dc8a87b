"""Models whose code between modules does more with a module's result than compute with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal


class Slots:
    """A class without a ``__dict__``."""

    __slots__ = ("h",)

    def __init__(self, h: Tensor) -> None:
        self.h = h


@dataclass(frozen=True)
class Fields:
    """A dataclass with tensors in a field and in a list, of which one may be a field of another."""

    h: Tensor | None
    more: list[Any] = field(default_factory=list)


class Lazy:
    """Computes with weights when it is read."""

    def __init__(self, lin: nn.Module, h: Tensor) -> None:
        self._lin, self._h = lin, h

    @property
    def h(self) -> Any:
        return self._lin(self._h)


class Gives(nn.Module):
    """Returns what ``give`` makes of its layer and its input, and uses its weight in any case."""

    def __init__(self, give: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.lin, self.give = nn.Linear(6, 6), give

    def forward(self, x: Tensor) -> Any:
        self.lin.weight.sum()
        return self.give(self.lin, x)


class SparseProduct(nn.Module):
    """Multiplies a sparse matrix by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight)


class Net(nn.Module):
    """Calls b on a value that it goes on to use, and does with the result what a derived class says."""

    c: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 6), Gives(self.give), nn.Linear(6, 6), nn.Linear(6, 5)

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        raise NotImplementedError

    def then(self, given: Any, h: Tensor) -> Tensor:
        return self.c(given) + h

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)) * 1
        return self.d(self.then(self.b(h), h))


class Changes(Net):
    """The result is the input, and is changed in place."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return x

    def then(self, given: Any, h: Tensor) -> Tensor:
        given += 1
        return self.c(given) + h


class ChangesInput(Changes):
    """The input is changed in place, while the result shares its memory."""

    def then(self, given: Any, h: Tensor) -> Tensor:
        h += 1
        return self.c(given) + h


class ChangesByData(Changes):
    """Autograd does not see the change."""

    def then(self, given: Any, h: Tensor) -> Tensor:
        given.data.mul_(0.5)
        return self.c(given) + h


class ReplacesData(Changes):
    """The result gets other memory."""

    def then(self, given: Any, h: Tensor) -> Tensor:
        given.data = given.data * 0.5
        return self.c(given) + h


class ChangesView(Net):
    """The result is a view of the input."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return {"view": x.view(-1, 2, 3)}

    def then(self, given: Any, h: Tensor) -> Tensor:
        given["view"][:, 0] = 0.5
        return self.c(h)


class ChangesTwin(Net):
    """Two results share memory."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        y = torch.tanh(lin(x)) * 1
        return y, y.view(-1, 2, 3)

    def then(self, given: Any, h: Tensor) -> Tensor:
        given[1][:, 0] = 0.5
        return self.c(given[0]) + h


class ChangesHalf(Net):
    """Two results are parts of one tensor, with no element in common."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        y = torch.tanh(lin(x)) * 1
        return y[:, :3], y[:, 3:]

    def then(self, given: Any, h: Tensor) -> Tensor:
        given[0].mul_(2)
        return self.c(torch.cat(given, 1)) + h


class ChangesCopy(Changes):
    """The result is a copy of the input."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return x.clone()


class ChangesOwn(Changes):
    """The result is a view of a new tensor."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return lin(x).view(-1, 6)


class Reads(Changes):
    """The result is the input, and nobody changes it."""

    def then(self, given: Any, h: Tensor) -> Tensor:
        return self.c(given) + h


class Notes(Net):
    """The module sets an attribute on its input."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        x.factor = 2.0  # type: ignore[attr-defined]
        return lin(x)

    def then(self, given: Any, h: Tensor) -> Tensor:
        return self.c(given) * getattr(h, "factor", 1.0)


class NotesLater(Changes):
    """An attribute is set on a result that is the input."""

    def then(self, given: Any, h: Tensor) -> Tensor:
        given.factor = 2.0
        return self.c(given) * getattr(h, "factor", 1.0)


class Halves(Net):
    """The module halves its input by ``.data`` in place."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        x.data.mul_(0.5)
        return lin(x)


class Sets(Net):
    """The module gives its input other memory."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        x.data = x.data.clamp(-0.3, 0.3)
        return lin(x)


class InObject(Net):
    """The result is an object with tensors in attributes."""

    def then(self, given: Any, h: Tensor) -> Tensor:
        return self.c(given.h) + h


class InNamespace(InObject):
    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return SimpleNamespace(h=lin(x))


class InSlots(InObject):
    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return [Slots(lin(x))]

    def then(self, given: Any, h: Tensor) -> Tensor:
        return super().then(given[0], h)


class InDataclass(InObject):
    """The result is a dataclass; a view in it is changed in place later."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        y = torch.tanh(lin(x)) * 1
        return Fields(y[:, :3], [y[:, 3:]])

    def then(self, given: Any, h: Tensor) -> Tensor:
        half = given.h
        half += 1
        return self.c(torch.cat([half, given.more[0]], 1)) + h


class InNestedDataclass(InDataclass):
    """A dataclass in a dictionary, in a dataclass."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return Fields(None, [{"inner": InDataclass.give(lin, x)}])

    def then(self, given: Any, h: Tensor) -> Tensor:
        return super().then(given.more[0]["inner"], h)


class InLazy(InObject):
    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return Lazy(lin, x)


class InDistribution(InObject):
    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return Normal(lin(x), 1.0, validate_args=False)

    def then(self, given: Any, h: Tensor) -> Tensor:
        return self.c(given.mean) + h


class InClosure(InObject):
    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return lambda: lin(x)

    def then(self, given: Any, h: Tensor) -> Tensor:
        return self.c(given()) + h


class InAttribute(InObject):
    """The module returns nothing, and leaves its result in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.b.give = self.leave

    def leave(self, lin: nn.Module, x: Tensor) -> None:
        self.b.h = lin(x)

    def then(self, given: Any, h: Tensor) -> Tensor:
        return self.c(self.b.h) + h


class BesideObject(InObject):
    """The object has no tensor that needs a gradient."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return lin(x), SimpleNamespace(n=2, positive=x > 0)

    def then(self, given: Any, h: Tensor) -> Tensor:
        y, beside = given
        return self.c(y) * beside.n * beside.positive


class Sparse(Net):
    """The result is a sparse matrix."""

    @staticmethod
    def give(lin: nn.Module, x: Tensor) -> Any:
        return torch.relu(lin(x)).to_sparse()

    def then(self, given: Any, h: Tensor) -> Tensor:
        return self.c(given.to_dense()) + h


class SparseToModule(Sparse):
    """The next module takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.c = SparseProduct()

    def then(self, given: Any, h: Tensor) -> Tensor:
        out: Tensor = self.c(given) + h
        return out
