"""Modules whose forward has side effects, or whose tensors are not only plain weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from tests.parallel.filling_nets import Collects, Listing
from tests.parallel.looking_nets import Inside, Looks, Replaced

__all__ = ["Collects", "Inside", "Listing", "Looks", "Replaced"]


class Net(nn.Module):
    """Three layers around an unusual module."""

    def __init__(self, middle: str, **settings: Any) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.middle = globals()[middle](**settings)
        self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(self.middle(torch.tanh(self.a(x))))))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)


class Clamped(Odd):
    """Its forward scales its weight and clamps it to a range."""

    def __init__(self, copied: bool = False) -> None:
        super().__init__()
        self.copied = copied

    def forward(self, x: Tensor) -> Tensor:
        self.lin.weight.data.mul_(0.9).clamp_(-0.2, 0.2)
        return F.linear(x, self.lin.weight.clone() if self.copied else self.lin.weight)


class Teacher(Odd):
    """A slow copy of a layer, updated in every training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.lin).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.lin.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
        return self.lin(x) + 0.3 * self.slow(x.detach())


class Averaged(Odd):
    """torch's own averaged copy, which reads a buffer to know whether this is the first update."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = AveragedModel(self.lin).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.slow.update_parameters(self.lin)
        return self.lin(x) + 0.3 * self.slow(x.detach())


class Second(Odd):
    """A slow copy that follows the inputs from the second forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.lin).requires_grad_(False)
        self.register_buffer("ran", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                if self.ran == 0:
                    self.slow.bias.copy_(self.lin.bias)
                else:
                    self.slow.bias.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.ran += 1
        return self.lin(x) + 0.3 * self.slow(x.detach())


class Rows(nn.Module):
    """A table whose rows are scaled to a norm of at most 1 when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach()[:, 0] > 0).long() + (x.detach()[:, 1] > 0).long())


class Centered(nn.Module):
    """Subtracts a running mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Seen(Centered):
    """Keeps a running mean that only evaluation uses."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean(0))
            return x
        return x - self.mean


class Counting(nn.Module):
    """Counts its calls and scales by the count, as a warm-up does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (self.calls / (self.calls + 2)).clone()


class Decayed(Odd):
    """Hooks drop the gradients of weights that are not positive, and the accumulated ones of such biases."""

    def __init__(self) -> None:
        super().__init__()
        w = self.lin.weight
        w.register_hook(lambda g: g * (w.detach() > 0))
        self.lin.bias.register_post_accumulate_grad_hook(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


def drop(p: Tensor) -> None:
    assert p.grad is not None
    p.grad *= p.detach() > 0


class Hooked(Odd):
    """Hooks on a module, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.lin.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
        self.lin.register_forward_hook(lambda m, args, out: out + m.weight.sum())
        self.lin.register_full_backward_hook(lambda m, into, out: (into[0] * 0.5,))
        self.lin.register_full_backward_pre_hook(lambda m, out: (out[0] * 3,))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Penalized(Odd):
    """Adds the gradient of its energy; ``backward``: by a call that also adds to its weights' gradients."""

    def __init__(self, backward: bool = False) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            if self.backward:
                at = x.detach().requires_grad_()
                torch.tanh(self.lin(at)).square().sum().backward()
                return self.lin(x) + at.grad
            at = x if x.requires_grad else x.clone().requires_grad_()
            (g,) = torch.autograd.grad(torch.tanh(self.lin(at)).square().sum(), at, create_graph=True)
        return x - 0.1 * g


class Wrapped(Odd):
    """A layer whose forward is wrapped in another function, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        plain, lin = self.lin.forward, self.lin
        self.lin.forward = lambda x: plain(x) * 2 + lin.weight.sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Normed(nn.Module):
    """Weights that are computed from others by torch's parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.new = parametrizations.weight_norm(nn.Linear(6, 6))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.orthogonal(torch.tanh(self.new(x)))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.new = parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.new(x)


class Kinds(nn.Module):
    """Tensors of every shape and dtype that a module may have. ``learns``: also trains low-precision ones."""

    def __init__(self, learns: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.empty(0, 6))
        self.order = nn.Parameter(torch.arange(5, -1, -1), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(6) > 1, requires_grad=False)
        self.low = nn.Parameter(torch.linspace(0, 1, 6).bfloat16(), learns)
        self.single = nn.Parameter(torch.linspace(1, 2, 6).float(), learns)
        self.register_buffer("turn", torch.polar(torch.ones(6), torch.linspace(0, 1, 6)).to(torch.complex64))
        self.eight = nn.Parameter(torch.linspace(0, 1, 6).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("small", torch.arange(6).to(torch.uint16))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, self.order] * self.mask * self.scale + self.none.sum()
        return (
            x * self.turn.real.to(x.dtype)
            + (self.low + self.single).to(x.dtype)
            + self.eight.to(x.dtype)
            + self.small.to(x.dtype)
        )


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turn).real


class Phases(nn.Module):
    """A complex buffer in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.ones(6, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turn).real


class Sparse(nn.Module):
    def __init__(self, bag: bool = False) -> None:
        super().__init__()
        self.table = (nn.EmbeddingBag if bag else nn.Embedding)(4, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        at = (x.detach()[:, :1] > 0).long()
        return x + self.table(at).reshape(x.shape)


class Synced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Frozen(nn.Module):
    """``parts`` are not trained. The first and last layers share a weight if ``tied``."""

    def __init__(self, parts: list[str], tied: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        if tied:
            self.d.weight = self.a.weight
        for name in parts:
            getattr(self, name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            x = torch.tanh(layer(x))
        return self.d(x)


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(6, 6), shared

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(torch.tanh(self.own(x))))


class Shared(nn.Module):
    """Blocks that share one module; ``counts``: the shared module changes a buffer."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        shared = Counting() if counts else nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Between(nn.Module):
    """The code between the layers changes a weight, or takes gradients."""

    def __init__(self, grads: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.grads = nn.Linear(6, 6), nn.Linear(6, 6), grads

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.grads:
            (g,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
            return self.b(h) + g
        self.b.weight.data.mul_(0.9)
        return self.b(h)


class Crossing(nn.Module):
    """A module takes the gradient with respect to one argument, from which another argument was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), Sensitive()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(h, self.b(h))


class Sensitive(Odd):
    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            out = self.lin(h) * y
            if not h.requires_grad:
                return out
            (g,) = torch.autograd.grad(out.sum(), h, create_graph=True)
        return out + g


class Strided(nn.Module):
    """A layer computes something else if its input is not contiguous; ``kept`` keeps it contiguous."""

    def __init__(self, kept: bool = False) -> None:
        super().__init__()
        self.a, self.b = EverySecond(kept), Asking()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


class EverySecond(Odd):
    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        return y if self.kept else torch.stack((y, y), -1)[..., 0]


class StridedPair(nn.Module):
    """A module returns a transposed tensor and one with gaps; another one reads the strides of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Pair(), AskingSecond()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


class Pair(Odd):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.lin(x)
        return y.t().contiguous().t(), torch.stack((y, y), -1)[..., 0]


class AskingSecond(Odd):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        first, second = pair
        y: Tensor = self.lin(first) + second
        return y if second.is_contiguous() else y * 2.0


class Asking(Odd):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        return y if x.is_contiguous() else y * 2.0


class Turned(nn.Module):
    """Layers pass complex numbers to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Turning(), Turning()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return torch.view_as_real(self.b(h.real) * h)[..., 0]


class Turning(Odd):
    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        return torch.complex(y, y)
