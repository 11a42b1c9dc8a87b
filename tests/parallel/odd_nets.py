"""Modules that are refused, each for one reason, and some that only look as if they should be refused."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.parallel.nets import NanoGPT

MEAN = torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])


class Made(nn.Module):
    """The glue makes tensors: from constants, from a size, from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.c = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * torch.linspace(0.5, 1.5, 6)
        place = torch.arange(x.shape[1])
        h = h + place[:, None] * torch.tensor([1.0, -1.0, 1.0, 2.0, 0.5, 0.1])
        h = self.b(h.masked_fill(place[:, None] > 2, 0.0) + torch.zeros(len(x), 1, 6))
        return self.c(h * torch.full((len(x), 1, 6), 0.3))


class Attribute(nn.Module):
    """Tensors as plain attributes, on the root and inside a named module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.freqs = torch.outer(torch.arange(8.0), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
        self.scaled = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.scaled(self.a(x)) + self.freqs[: x.shape[1]].cos())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = torch.linspace(1, 2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class Recurrent(nn.Module):
    """A module returns a nested structure, of which only a part is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.rnn, self.head = nn.Linear(6, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, (last, _) = self.rnn(self.a(x))
        return self.head(out + last[0][:, None])


class Changed(nn.Linear):
    """Its output can be changed from outside by replacing ``by``."""

    by = staticmethod(lambda x: x)

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.by(super().forward(x))


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = Changed(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x))


class Foreign(nn.Module):
    """The glue uses a tensor that does not belong to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x) - MEAN)


class Listed(nn.Module):
    """Tensors in a list, where ``nn.Module`` does not find them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.masks = [torch.ones(6), torch.zeros(6)]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x) * self.masks[0])


class Lazy(nn.Module):
    """A layer that learns its width from its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.LazyLinear(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x))


class Backwards(nn.Module):
    """Its modules are called in another order than their names suggest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 3), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.last(x))


class Objects(nn.Module):
    """A module hands a dictionary to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = Wrapped(), Unwrapped()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x))


class Wrapped(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"hidden": super().forward(x)}


class Unwrapped(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x["hidden"])


class ByMode(nn.Module):
    """Glue that differs between training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.head(h * 2 if self.training else h)


class ByData(nn.Module):
    """Glue that looks at the data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:
            h = -h
        return self.head(h)


class TooLong(NanoGPT):
    """Its own assert fails for the shapes that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.block_size = 2


class Added(nn.Module):
    """On each stage two parameters share one gradient tensor, which is also sent back; a third's has stride 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(6, 6), Offsets(), Offsets()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.first(x)).tanh()))


class Offsets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.total = (nn.Parameter(torch.randn(2, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one + self.two + self.total.sum()


class Again(nn.Module):
    """Two weights used in turn, twice each, and slices of a third: a split backward may count them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.slices = nn.Parameter(torch.randn(3, 6, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weight * self.scale) @ self.weight * self.scale
        a, b, c = self.slices.unbind(0)
        x = x @ a
        return (x @ b) * torch.tanh(x @ c)


class UsedAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(6, 6), Again(), Again()
        self.rnn, self.head = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(self.first(x)))
        out = self.rnn(x.unsqueeze(1))[0]
        return self.head(out.squeeze(1))


class Between(nn.Module):
    """Calls ``between`` between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.steps = {lambda x: self.a(x)}

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.a(x)))


class Closure(Between):
    def between(self, x: Tensor) -> Tensor:
        return next(iter(self.steps))(x)


class Mapped(Between):
    def between(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: row * 2)(x)


class KeyCache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Remembering(nn.Linear):
    def forward(self, x: Tensor, cache: KeyCache) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Caching(Between):
    def __init__(self) -> None:
        super().__init__()
        self.a = Remembering(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x, KeyCache()))


class OtherDtype(Between):
    """The code between its modules casts to a fixed dtype."""

    def between(self, x: Tensor) -> Tensor:
        return x.float()


class Seeds(nn.Module):
    """The code between its layers seeds torch's random stream and restores it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            noise = torch.randn(6).to(x.dtype)
        return self.head(self.a(x) + noise)


class Dice(Seeds):
    """Draws from a generator that is seeded at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.dice = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.dice.manual_seed(3)
        return self.head(self.a(x) + torch.randn(6, generator=self.dice).to(x.dtype))


class Packs(Seeds):
    """Uses hooks on what autograd saves."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()):
            return self.head(self.a(x))


class ReadsGrad(Seeds):
    """Divides by the norm of the current gradient."""

    def forward(self, x: Tensor) -> Tensor:
        grad = self.head.weight.grad
        return self.head(self.a(x) if grad is None else self.a(x) / grad.norm())


class InPlaceBesideClone(nn.Module):
    """The next stage changes its input in place, beside a clone of another value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1.0
        h += self.b((h * 2).sin().clone())
        return self.head(h)


class WrittenByView(Seeds):
    """Reads a tensor of its own after a view has changed it."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(5)
        mask[:2].fill_(1.0)
        return self.head(self.a(x) * (2 if mask.sum() > 1 else 1))


class Transforms(Seeds):
    """Takes a step by torch.func in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.a.named_parameters())

        def error(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.a, weights, (x,)).square().mean()

        steps = torch.func.grad(error)(weights)
        new = {name: w - 0.1 * steps[name] for name, w in weights.items()}
        return self.head(torch.func.functional_call(self.a, new, (x,)))
