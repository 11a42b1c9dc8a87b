"""Models, an optimizer and data that are correct but unusual, or that have a fault which a certificate must find."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.data.shuffle import Indices
from launcher.data.source import Source

CLASSES, WIDTH = 6, 8


class Draws(Source):
    """Floats and classes. Targets whose index is divisible by ``ignored`` do not count."""

    def __init__(self, split: str, samples: int = 40, ignored: int = 0) -> None:
        self.samples, self.ignored = samples, ignored

    def __len__(self) -> int:
        return self.samples

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        streams = (torch.Generator().manual_seed(int(i)) for i in indices)
        return (torch.stack([torch.randn(4, WIDTH, generator=g) for g in streams]),)

    def targets(self, indices: Indices) -> Tensor:
        found = torch.from_numpy(indices[:, None] + indices.dtype.type(1) * [[0, 1, 2, 3]]) % CLASSES
        if self.ignored:
            found[torch.from_numpy(indices % self.ignored == 0)] = -100
        return found


class Net(nn.Module):
    """Two linear layers around ``middle``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.middle(torch.tanh(self.a(x))))
        return out

    def middle(self, x: Tensor) -> Tensor:
        return x


class Follower(nn.Module):
    """Adds a moving average of its inputs if ``used``; otherwise it updates the average even in evaluation."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.used = used
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not self.used:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return x + self.seen if self.used else x


class Averaged(Net):
    def __init__(self, used: bool) -> None:
        super().__init__()
        self.follower = Follower(used)

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.follower(x)
        return out


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class InstanceNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class NotTracked(Net):
    """Normalizes by each micro batch, and tracks no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


CALLS = 0


class Counted(Net):
    """Counts its calls outside of itself in every mode, and scales by the count."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def middle(self, x: Tensor) -> Tensor:
        global CALLS
        if self.how == "variable":
            CALLS += 1
            return x * (1 + 0.1 * CALLS)
        if self.how == "library":
            functional.tests_calls = getattr(functional, "tests_calls", 0) + 1  # type: ignore[attr-defined]
            return x * (1 + 0.1 * functional.tests_calls)  # type: ignore[attr-defined]
        os.environ["TESTS_CALLS"] = str(int(os.environ.get("TESTS_CALLS", "0")) + 1)
        return x * (1 + 0.1 * int(os.environ["TESTS_CALLS"]))


class Drawn(Net):
    """Multiplies by a random matrix that no checkpoint keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.randn(WIDTH, WIDTH), persistent=False)
        self.mix: Tensor

    def middle(self, x: Tensor) -> Tensor:
        return x @ self.mix


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


class Looking(Net):
    """Computes something else depending on the data."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.stack([-t if t.sum() > 0 else t * 2 for t in x])


class Picky(Net):
    """Raises for samples whose positions are all equal."""

    def middle(self, x: Tensor) -> Tensor:
        if x.device.type != "meta" and torch.equal(x[:, 0], x[:, 1]):
            raise ValueError("nothing varies")
        return x


class Loud(Net):
    """Its gradients exceed the largest number of fp16 at most loss scales."""

    def middle(self, x: Tensor) -> Tensor:
        return x + (x * 3e4 - (x * 3e4).detach())


class Uncopied(Net):
    """Cannot be copied, because it keeps a tensor that it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(WIDTH))
        self.twice = self.a.weight * 2

    def middle(self, x: Tensor) -> Tensor:
        self.twice = self.a.weight * 2
        return x @ self.twice


class Experts(nn.Module):
    """Sends every position to the expert that its first number selects."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        to = (x[..., 0] * 100).long() % len(self.each)
        for n, expert in enumerate(self.each):
            if (mine := to == n).any():
                out[mine] = expert(x[mine])
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.b = Experts(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(x + self.experts(x))
        return out


class Autocast(Net):
    """Computes a part in bf16; ``low`` is an attribute that a layout may lose."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.low = nn.Linear(WIDTH, WIDTH), True

    def middle(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
            h = torch.tanh(self.c(x))
        return h.to(x.dtype)


class DropsAttention(Net):
    """Its dropout is inside attention, so no dropout module draws the random numbers."""

    def middle(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)


class DropsAttentionInside(Net):
    """Does the same in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.attend(x)
        return out


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)


class NoisyAlways(nn.Module):
    """Has dropout that cannot be turned off, noise, and its own generator, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix, self.b = nn.Linear(WIDTH, WIDTH), Noise(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.mix(torch.tanh(self.a(x))))
        return out


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.25) + 0.1 * torch.randn_like(x)
        return x * torch.rand(x.shape[:1], generator=torch.Generator().manual_seed(int(x.numel())))[:, None, None]


class PythonNoise(Noise):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class DrawsElsewhere(NoisyAlways):
    def __init__(self) -> None:
        super().__init__()
        self.mix = PythonNoise()


class KeepsAsleep(Net):
    """Its train() keeps a norm in evaluation mode and a noise module in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.drop = nn.BatchNorm1d(4), Noisy()

    def train(self, mode: bool = True) -> KeepsAsleep:
        super().train(mode)
        self.n.eval()
        self.drop.training = True
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.drop(self.n(torch.tanh(self.a(x)))))
        return out


class Noisy(nn.Module):
    """Adds a tenth in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.1 if self.training else x


class HandedOutAsleep(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.eval()


class Factored(Net):
    """A layer that is initialized from a singular value decomposition, as in PiSSA."""

    def __init__(self) -> None:
        super().__init__()
        u, s, vh = torch.linalg.svd(torch.randn(WIDTH, WIDTH))
        self.u, self.vh = nn.Parameter(u * s), nn.Parameter(vh.contiguous())

    def middle(self, x: Tensor) -> Tensor:
        return x @ self.u @ self.vh


class Tall(Net):
    """Two weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.c(x))


class Tied(Net):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, WIDTH)
        self.c.weight = self.a.weight

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.c(x))


class Lion(torch.optim.Optimizer):
    """An optimizer in a user's own code."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.add_(m.sign(), alpha=-group["lr"])
