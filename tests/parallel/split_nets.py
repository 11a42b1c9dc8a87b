"""Nets whose backward torch's own way of splitting gets wrong: weights used twice, transposed gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, WORDS, HEADS = 6, 8, 2


class Two(nn.Module):
    """Returns two tensors, each from its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


class Both(nn.Module):
    """Takes two tensors and detaches the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.one(x) + other.detach()


class Detaching(nn.Module):
    """A tensor that crosses a boundary requires a gradient but gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.two, self.both = nn.Linear(WIDTH, WIDTH), Two(), Both()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.both(*self.two(self.first(x))))


class SharedBias(nn.Module):
    """Two modules with one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.bias = self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh()) + x


class LookedUpTwice(nn.Module):
    """A table that is looked up twice and also used as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        x = x + self.table(places) * torch.tanh(x + self.table(WORDS - 1 - places))
        return x + F.linear(x, self.table.weight).softmax(-1) @ self.table.weight


class Attention(nn.Module):
    """Attention with a position bias that it gets as an argument, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class RelativeBias(nn.Module):
    """Two attention blocks that share a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.one, self.two = nn.Embedding(2 * WORDS, HEADS), Attention(), Attention()

    def bias(self, length: int) -> Tensor:
        at = torch.arange(length, device=self.table.weight.device)
        return self.table(at[:, None] - at[None, :] + WORDS).permute(2, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x, self.bias(x.shape[1])), self.bias(x.shape[1]))


class Across(nn.Module):
    """The gradient of its input is the sum of a transposed one of an LSTM and a slice of a wider one."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.mix = nn.LSTM(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rnn(x.transpose(0, 1))[0].transpose(0, 1)
        return self.mix(torch.cat([x, y], -1))


class Block(nn.Module):
    """A block of all the modules above."""

    def __init__(self) -> None:
        super().__init__()
        self.across, self.shared, self.looked, self.relative = Across(), SharedBias(), LookedUpTwice(), RelativeBias()

    def forward(self, x: Tensor) -> Tensor:
        return self.relative(self.looked(self.shared(self.across(x))))


class Net(nn.Module):
    """Every stage has a full block, and a skip connection crosses the stages between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b, self.c = nn.Embedding(WORDS, WIDTH), Block(), Block(), Block()
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.embed(tokens)
        x = self.b(self.a(first).transpose(1, 2).transpose(1, 2))
        return self.head(torch.cat([first, self.c(x)], -1))


class T5Like(nn.Module):
    """The first block owns the table and passes the bias on to all others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.relative = nn.Embedding(WORDS, WIDTH), RelativeBias()
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.relative(self.embed(tokens))
        bias = self.relative.bias(x.shape[1])
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x)


class Turned(nn.Module):
    """The gradient of each stage's input is transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(5, 6), nn.Linear(5, 5), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).transpose(1, 2)).transpose(1, 2)
        return self.head(torch.cat([x, self.c(x.flip(1))], 1))


class Directional(nn.Module):
    """A layer and its derivative in one direction, by ``jvp`` or ``jacfwd`` of ``torch.func``."""

    def __init__(self, transform: str, dim: int) -> None:
        super().__init__()
        self.transform = transform
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def function(t: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(t))

        direction = torch.ones_like(x)
        if self.transform == "jvp":
            y, along = torch.func.jvp(function, (x,), (direction,))
        else:
            y, along = torch.func.vmap(function)(x), torch.func.vmap(torch.func.jacfwd(function))(x).sum(-1)
        return y + along


class Derivatives(nn.Module):
    """Two layers with derivatives, and a head."""

    def __init__(self, transform: str, dim: int = 6) -> None:
        super().__init__()
        self.a, self.b = Directional(transform, dim), Directional(transform, dim)
        self.head = nn.Linear(dim, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = self.b(x)
        return self.head(x)
