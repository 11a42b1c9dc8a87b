"""Models whose output for a sample depends, or does not depend, on the other samples of its batch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Untracked(nn.BatchNorm1d):
    """A batch norm without running statistics."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, track_running_stats=False)


class Centered(nn.BatchNorm1d):
    """A batch norm with its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0) if self.training else self.running_mean
        return (x - mean) * self.weight


class InBackward(torch.autograd.Function):
    """The identity, whose backward applies ``change`` to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None


BACKWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda g: g - g.mean(0),
    "normalized": lambda g: g / g.norm(),
    "mean of gradients": lambda g: g / len(g),
    "slightly centred": lambda g: g - 1e-5 * g.mean(0),
    "turned round": lambda g: -g,
    "clipped by sample": lambda g: g / g.norm(dim=-1, keepdim=True).clamp(min=0.1),
}


TICKS = itertools.chain([1.0, 1.0], itertools.count())
"""A clock whose second reading happens to equal the first."""


def clip(weight: nn.Parameter) -> None:
    """Clips the gradient of a weight, as a hook after its accumulation."""
    assert weight.grad is not None
    weight.grad.clamp_(-1e-3, 1e-3)


def halve(weight: nn.Parameter) -> None:
    """Halves the accumulated gradient of a weight: the parts of a batch are halved again and again."""
    assert weight.grad is not None
    weight.grad *= 0.5


class Rounded(torch.autograd.Function):
    """A product whose backward rounds the gradient of the weight, in parts of its largest element."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        full = grad.t() @ x
        part = full.abs().max() / 7
        return grad @ weight, (full / part).round() * part


class Net(nn.Module):
    """Two layers with an operation of ``kind`` between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        norms = {"batch norm": nn.BatchNorm1d, "untracked norm": Untracked, "own batch norm": Centered}
        self.norm = norms.get(kind, nn.LayerNorm)(6)
        self.drop = nn.Dropout(0.5)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.gate = nn.Linear(6, 2)
        self.calls, self.state = 0, {"calls": 0}
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(6))
        self.share = nn.Parameter(torch.zeros(()))
        if kind == "bias before softmax":
            self.shift = nn.Parameter(torch.zeros(1))
        if kind == "clipped by a hook":
            self.b.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        if kind == "clipped after its sum":
            self.b.weight.register_post_accumulate_grad_hook(clip)
        if kind == "halved after its sum":
            self.b.weight.register_post_accumulate_grad_hook(halve)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.between(torch.tanh(self.a(x)))))

    def between(self, x: Tensor) -> Tensor:
        if self.kind in BACKWARDS:
            return InBackward.apply(self.b(x), BACKWARDS[self.kind])
        if self.kind == "straight through":
            return x + x.mean(0) - x.mean(0).detach()
        if self.kind == "learned scale":  # as LSQ does: the gradient is divided by the number of elements
            part = 1 / x.numel() ** 0.5
            return x * (1 + (self.share - self.share * part).detach() + self.share * part)
        if self.kind == "rounded weight's gradient":
            return Rounded.apply(x, self.b.weight)
        if self.kind == "weight's gradient":
            weight = self.b.weight / len(x) + (self.b.weight * (1 - 1 / len(x))).detach()
            return torch.nn.functional.linear(x, weight)
        if self.kind == "bias before softmax":
            scores = self.b(x)[:, :, None] * torch.linspace(-1, 2, 15, dtype=x.dtype, device=x.device)
            return x.detach() + x * torch.softmax(scores + self.shift, -1)[..., 4]
        if self.kind.startswith(("clipped", "halved")):
            return self.b(x)
        if self.kind == "hook":
            if x.requires_grad:
                x.register_hook(lambda g: g - g.mean(0))
            return x
        if self.kind == "recomputed":
            return checkpoint(self.b, x, use_reentrant=False)
        if self.kind == "negatives":
            likeness = F.normalize(x, dim=-1) @ F.normalize(self.b(x), dim=-1).T
            return x * likeness.log_softmax(-1).diagonal()[:, None]
        if self.kind == "mean":
            return x - x.mean(0)
        if self.kind == "later":
            self.calls += 1
            return x - x.mean(0) if self.calls > 100 else x
        if self.kind == "later by a dict":
            self.state["calls"] += 1
            return x - min(1.0, (self.state["calls"] - 1) / 2000 // 1) * x.mean(0)
        if self.kind == "later by a buffer":
            self.count += 1
            return x - (self.count > 500_000) * x.mean(0)
        if self.kind == "later in the backward":
            return InBackward.apply(x, self.counted)
        if self.kind == "gated from zero":
            return x - self.share * x.mean(0)
        if self.kind == "in half precision":
            rough = x.to(torch.bfloat16)
            return x + 0.01 * rough.mean(0).to(x.dtype)
        if self.kind == "counts":
            self.calls += 1
            return x * min(1.0, self.calls / 1000)
        if self.kind == "clock":
            return x * next(TICKS)
        if self.kind == "renormalized":
            mean, seen = x.mean(0), self.seen
            self.seen = seen.lerp(mean.detach(), 0.1)
            return x - mean + (mean.detach() - seen).clamp(-0.5, 0.5)
        if self.kind == "mean and dropout":
            return self.drop(x - x.mean(0))
        if self.kind in ("capacity", "experts"):
            return self.routed(x, len(x) if self.kind == "experts" else (len(x) + 1) // 2)
        if self.kind == "experts and dropout":
            return self.routed(x, len(x), self.drop)
        if self.kind == "bound":
            x = self.b(x)
            return x / x.abs().max().clamp(min=1.5)
        if self.kind == "chaos":
            for _ in range(200):
                x = torch.tanh(self.b(x))
            return x
        if self.kind == "mixup by numpy":
            share = np.random.beta(0.4, 0.4) if self.training else 0.5
            return share * x + (1 - share) * x[torch.randperm(len(x))]
        if self.kind == "mixup in numpy's order":
            return x + 0.5 * x[torch.from_numpy(np.random.permutation(len(x)))] if self.training else x
        if self.kind == "one draw by Python":
            return x * random.random()
        if self.kind == "draws of each by Python":
            return x * torch.tensor([random.random() for _ in x]).to(x)[:, None]
        if self.kind == "mixup":
            share = torch.distributions.Beta(0.4, 0.4).sample() if self.training else 0.5
            return x + share * x[torch.randperm(len(x), device=x.device)]
        if self.kind == "divided by its number":
            return x / len(x)
        if self.kind == "slightly":
            return x + 1e-6 * x.square().mean()
        if self.kind == "hardest":
            return x * (x.square().sum(1) >= x.square().sum(1).median())[:, None]
        if self.kind == "dropout before a mean":
            return self.drop(x) - x.mean(0)
        if self.kind == "more than eight":
            return x - x.mean(0) if len(x) > 8 else x
        if self.kind == "groups of six":
            return (x.view(-1, 6, 6) - x.view(-1, 6, 6).mean(1, keepdim=True)).flatten(0, 1)
        if self.kind == "classes of one":
            own = (20 * x[:, 0]).round()
            others = (own[:, None] == own).fill_diagonal_(False).to(x)
            return x * ((x @ x.T * others).sum(1) / others.sum(1))[:, None]
        if self.kind == "mean and draws":
            self.drawn = torch.multinomial(torch.tensor([0.0, 1.0]), 1)
            return x - x.mean(0) if self.training else x
        if self.kind == "draws of the sample":
            return x + torch.poisson(x.abs() * 40) if self.training else x
        if self.kind == "no equal ends":
            if len(x) > 1 and torch.equal(x[0], x[-1]):
                raise ValueError("the first sample is the last one")
            return x
        if self.kind == "functional norm":
            return F.batch_norm(x, None, None, training=True)
        return self.drop(x) if self.kind == "dropout" else self.norm(self.b(x))

    def counted(self, grad: Tensor) -> Tensor:
        """Centers the gradient after a hundred backwards."""
        self.calls += 1
        return grad - grad.mean(0) if self.calls > 100 else grad

    def routed(self, x: Tensor, capacity: int, drop: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
        """Each expert takes the first ``capacity`` samples that are routed to it."""
        first, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            places = (first == n).nonzero()[:, 0][:capacity]
            out = out.index_add(0, places, drop(expert(x[places])))
        return x + out


class OnlyTrained(Net):
    """Mixes samples in training only, as a model that computes its own loss does."""

    def between(self, x: Tensor) -> Tensor:
        return super().between(x) if self.training else x


class Domains(Net):
    """The class of the first sample chooses the layer for all."""

    def forward(self, x: Tensor, domain: Tensor) -> Tensor:
        return self.head(torch.tanh(self.experts[int(domain[0])](x)))


class Words(Net):
    """A model with 8 tokens per sample, as many as a trial has samples; ``first``: positions come first."""

    def __init__(self, kind: str, first: bool) -> None:
        super().__init__(kind)
        self.first = first
        self.table, self.places = nn.Embedding(16, 6), nn.Embedding(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(8, device=x.device).expand_as(x)
        x, at = (x.T, at.T) if self.first else (x, at)
        made = torch.tanh(self.table(x) + self.places(at))
        made = made.cumsum(0) if self.first else made.cumsum(1)
        return self.head(self.between(made.transpose(0, 1) if self.first else made))


class Sentences(Net):
    """Experts choose tokens of all samples: ``room`` is the share of all tokens that one of them takes."""

    def __init__(self, room: float) -> None:
        super().__init__("tokens")
        self.room = room
        self.table = nn.Embedding(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.table(x).flatten(0, 1)
        out = self.routed(tokens, math.ceil(self.room * len(tokens)))
        return self.head(torch.tanh(out)).view(*x.shape, -1)
