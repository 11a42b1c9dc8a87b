"""Parameters that are of odd kinds, frozen, unused or swapped."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.zoo.case import ABCD, D, Net, block, odd


class _Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=D)


@odd("a", "spectrum", "c", "d")
class Complex(Net):
    """A complex parameter, as in Fourier operators."""

    def extra(self) -> None:
        self.spectrum = _Spectrum()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.spectrum(self.a(x))))


@odd(*ABCD)
class ComplexValues(Net):
    """A complex value crosses the cut."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.fft.rfft(self.b(self.a(x)))
        return self.d(self.c(torch.fft.irfft(h * 1j, n=D)))


@odd(*ABCD)
class FrozenStage(Net):
    """The first two blocks are frozen: a full stage."""

    def extra(self) -> None:
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)


@odd(*ABCD)
class FrozenEnd(Net):
    """The last two blocks are frozen."""

    def extra(self) -> None:
        self.c.requires_grad_(False)
        self.d.requires_grad_(False)


@odd(*ABCD)
class FrozenInPart(Net):
    """One weight and one bias are frozen."""

    def extra(self) -> None:
        self.b[0].weight.requires_grad_(False)
        self.c[0].bias.requires_grad_(False)


class _Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, D) / 3), nn.Parameter(torch.randn(D, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return out


@odd(*ABCD, optim="adamw")
class Lora(Net):
    """Low-rank additions to two frozen layers; all other weights are frozen too."""

    def extra(self) -> None:
        self.requires_grad_(False)
        self.b[0], self.d = _Lora(self.b[0]), _Lora(self.d)


@odd(*ABCD)
class Scalars(Net):
    """0-d parameters on the root and in a module."""

    def extra(self) -> None:
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.b.register_parameter("shift", nn.Parameter(torch.tensor(0.1)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)) + self.b.shift
        return self.d(self.c(h * self.scale)) * self.scale.exp()


class _Numbered(nn.Module):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = block()
        self.register_buffer("scale", torch.tensor(1.0 + _Numbered.made / 4))
        _Numbered.made += 1
        with torch.no_grad():
            self.net[0].weight.div_(next(PLACES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


PLACES = itertools.count(1)


@odd(*ABCD)
class NumberedLayers(Net):
    """Layers count themselves in a class attribute and in a counter of the file, and are scaled by their numbers."""

    def extra(self) -> None:
        self.b, self.c = _Numbered(), _Numbered()


@odd(*ABCD)
class Empty(Net):
    """A parameter without elements and a buffer without elements."""

    def extra(self) -> None:
        self.b.register_parameter("none", nn.Parameter(torch.zeros(0, D)))
        self.c.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.d(self.c(h + torch.cat([self.b.none, h[:1] * 0]).sum(0)))


@odd(*ABCD)
class UnusedPart(Net):
    """A parameter that nothing uses, and a head that is not called."""

    def extra(self) -> None:
        self.b.register_parameter("unused", nn.Parameter(torch.randn(D, D)))
        self.c.head = nn.Linear(D, D)
        self.c = _First(self.c)


class _First(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net[0:2], net.head  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


@odd(*ABCD)
class UnusedModule(Net):
    """A module that the root never calls."""

    def extra(self) -> None:
        self.never = nn.Linear(D, D)


@odd(*ABCD)
class IntegerBuffers(Net):
    """Integer, boolean and permutation buffers."""

    def extra(self) -> None:
        self.register_buffer("order", torch.arange(D).flip(0))
        self.c.register_buffer("mask", torch.arange(D) % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))[:, self.order]
        return self.d(torch.where(self.c.mask, self.c(h), h))


@odd(*ABCD)
class Swapped(Net):
    """The constructor exchanges weights between layers by ``.data =``."""

    def extra(self) -> None:
        self.a[0].weight.data, self.b[0].weight.data = self.b[0].weight.data, self.a[0].weight.data * 0.5
        self.c[0].weight.data = torch.eye(D)


class _Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


@odd(*ABCD)
class ClampedData(Net):
    """Weights are clamped by ``.data`` in the forward, as in Wasserstein critics."""

    def extra(self) -> None:
        self.b = _Clamped(D, D)


@odd(*ABCD)
class Lists(Net):
    """Weights in a ParameterList and a ParameterDict."""

    def extra(self) -> None:
        self.ws = nn.ParameterList([torch.randn(D, D) / 3 for _ in range(3)])
        self.ps = nn.ParameterDict({"in": torch.randn(D), "out": torch.ones(D)})

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x + self.ps["in"])
        for w in self.ws:
            h = torch.tanh(h @ w)
        return self.d(self.c(self.b(h))) * self.ps["out"]


@odd(*ABCD)
class Uneven(Net):
    """No width is divisible by the number of shards."""

    def extra(self) -> None:
        self.a, self.b, self.c, self.d = block(D, 7), block(7, 5), block(5, 3), nn.Linear(3, D)


@odd(*ABCD)
class Strided(Net):
    """A weight that is transposed in memory."""

    def extra(self) -> None:
        self.b[0].weight = nn.Parameter(torch.randn(D, D).t() / 3)


@odd(*ABCD)
class TiedSlices(Net):
    """The glue uses a slice of one layer's weight and a row of another's."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        h = F.linear(h[:, :4], self.a[0].weight[:, :4]) + self.d.weight[0]
        return self.d(self.c(h))


@odd("a", "hyper", "c", "d")
class Hypernetwork(Net):
    """A layer whose weights another net makes."""

    def extra(self) -> None:
        self.hyper = nn.Linear(D, D * D)
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        w = self.hyper(h.mean(0)).view(D, D)
        return self.d(self.c(F.linear(h, w).tanh()))


@odd(*ABCD)
class Cloned(Net):
    """The glue uses functions of weights: a root mean square, and a transposed clone."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)) / self.b[0].weight.square().mean().sqrt()
        return self.d(self.c(h @ self.a[0].weight.t().clone()))
