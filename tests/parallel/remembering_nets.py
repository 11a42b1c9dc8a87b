"""Modules that remember state outside parameters and persistent buffers, and use it in the next forward."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

LOG: list[int] = []


class Remembers(nn.Module):
    """Remembers a value of ``kind``, under the name ``kept``."""

    calls = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.lin = nn.Linear(6, 6)
        start: dict[str, Any] = {
            "number": 0, "list": [], "deque": deque(maxlen=3), "array": np.ones(2), "python": random.Random(0),
            "numpy": np.random.default_rng(0), "torch": torch.Generator().manual_seed(0), "cache": None, "unread": 0,
            "mean": 1.0, "seen": [], "shaped": torch.Generator().manual_seed(0), "calls": None, "log": None,
        }  # fmt: skip
        if kind == "buffer":
            self.register_buffer("kept", torch.ones(()), persistent=False)
        else:
            self.kept = start[kind]

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.lin(x))
        return out * self.scale(x.detach()) if self.training else out

    def scale(self, x: Tensor) -> Any:
        if self.kind == "unread":
            self.kept = len(x)
            return 1.0
        if self.kind == "cache":
            if self.kept is None:
                self.kept = 2.0
            return self.kept
        if self.kind == "python":
            return self.kept.random()
        if self.kind == "numpy":
            return float(self.kept.random())
        if self.kind == "torch":
            return torch.rand((), generator=self.kept, device="cpu").item()
        return self.counted(x)

    def counted(self, x: Tensor) -> Any:
        if self.kind == "shaped":
            return torch.rand(x.shape, generator=self.kept)
        if self.kind == "calls":
            Remembers.calls += 1
            return self.calls
        if self.kind == "log":
            LOG.append(len(LOG))
            return 1.0
        if self.kind == "number":
            self.kept += 1
            return self.kept
        if self.kind in ("list", "deque"):
            self.kept.append(1 + len(self.kept) % 3)
            return sum(self.kept)
        if self.kind == "array":
            self.kept *= 0.9
            return float(self.kept.sum())
        if self.kind == "mean":
            self.kept = 0.5 * self.kept + 0.5 * float(x.abs().mean())
            return self.kept
        if self.kind == "seen":
            self.kept.append(float(x.abs().max()))
            return sum(self.kept[-3:])
        self.kept = self.kept * 0.9
        return self.kept


class Told(Remembers):
    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Forgets(Told):
    """Returns its state, and does not restore it."""

    def set_extra_state(self, state: Any) -> None:
        pass


class OnWeight(nn.Module):
    """Counts in an attribute of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        calls = getattr(self.weight, "calls", 0)
        self.weight.calls = calls + 1  # type: ignore[attr-defined]
        return x * self.weight * (1 + 0.1 * calls)


class CountsOnWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.middle, self.head = nn.Linear(6, 6), OnWeight(), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.a(x)))
        return out


class Reversing(torch.autograd.Function):
    """Returns the negative gradient, or one that grows with the number of backwards of its module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.module.calls += 1
        return -grad * (ctx.module.calls if ctx.module.reads else 1), None


class Reverses(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.calls, self.reads = 0, reads

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Reversing.apply(x, self)
        return out


class CountsBackwards(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.a, self.middle, self.head = nn.Linear(6, 6), Reverses(reads), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.a(x)))
        return out


class Net(nn.Module):
    def __init__(self, kind: str, told: bool = False, forgets: bool = False) -> None:
        super().__init__()
        made = Forgets if forgets else Told if told else Remembers
        self.a, self.middle, self.head = nn.Linear(6, 6), made(kind), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.a(x))))


class Bag:
    """An object of the user's that a module remembers."""

    def __init__(self) -> None:
        self.value: Any = None


class Carries(nn.Module):
    """Divides by a number of an earlier batch, which it has in a tensor in some ``place``."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.prev: Any = {"list": [], "deque": deque(maxlen=2), "dict": {}, "object": Bag()}.get(place)

    def earlier(self) -> Any:
        if self.place in ("attribute", "inplace", "once"):
            return self.prev
        if self.place in ("list", "deque"):
            return torch.stack([*self.prev]).mean() if self.prev else None
        return self.prev.get("value") if self.place == "dict" else self.prev.value

    def keep(self, m: Tensor) -> None:
        if self.place in ("list", "deque"):
            self.prev.append(m)
        elif self.place == "dict":
            self.prev["value"] = m
        elif self.place == "object":
            self.prev.value = m
        elif self.place == "inplace" and self.prev is not None:
            self.prev.lerp_(m, 0.1)
        elif self.place != "once" or self.prev is None:
            self.prev = m.clone()

    def forward(self, x: Tensor) -> Tensor:
        m, earlier = x.detach().abs().mean(), self.earlier()
        self.keep(m)
        return x if earlier is None else x / (1 + earlier)


class Overwrites(nn.Module):
    """Keeps a number of each sample, or of the batch, in some ``place``; only the same forward reads it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.mean: Any = None
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        m = x.detach().mean(-1, keepdim=True)
        if self.place == "dict":
            self.kept["mean"] = m
            return x - self.kept["mean"]
        self.mean = m.mean().item() if self.place == "number" else m
        return x - self.mean


class Branches(nn.Module):
    """Changes a number if the batch has a property that no batch of a trial has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.beta, self.bad = kind, 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        m = x.detach().abs().mean()
        if self.kind == "number" and m.item() > 1e4:
            self.beta *= 0.5
        elif self.kind != "number" and m > 1e4:
            if self.kind == "unread":
                self.bad += 1
            else:
                self.beta *= 0.5
        return x * self.beta


class SavesGradient(nn.Module):
    """Scales by the size of the last gradient, which a hook keeps in some ``place``."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.lin = nn.Linear(6, 6)
        if place == "buffer":
            self.register_buffer("kept", torch.ones(()))
        else:
            self.kept: Any = {"list": [1.0], "tensor": torch.tensor(1.0), "unread": 1.0}.get(place, 1.0)
        if place == "module":
            self.lin.register_full_backward_hook(lambda m, given, got: self.save(got[0]))

    def save(self, g: Tensor) -> None:
        if self.place == "buffer":
            self.kept.copy_(g.norm())
        elif self.place == "list":
            self.kept.append(float(g.norm()))
        elif self.place == "tensor":
            self.kept = g.norm()
        else:
            self.kept = float(g.norm())

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.lin(x)
        if h.requires_grad and self.place != "module":
            h.register_hook(self.save)
        if self.place == "unread":
            return h
        last = self.kept[-1] if self.place == "list" else self.kept
        return h * (1 - 0.5 / (1 + last))


class Holder(nn.Module):
    """A net with one of the modules above, by its name, in the middle."""

    def __init__(self, part: str, place: str) -> None:
        super().__init__()
        self.a, self.middle, self.head = nn.Linear(6, 6), globals()[part](place), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.a(x))))


class Average(nn.Module):
    """Keeps an average of its inputs for evaluation: torch's ``instance`` norm, or one of ``own``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True) if kind == "instance" else None
        self.register_buffer("average", torch.zeros(6))
        self.average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            out: Tensor = self.norm(x.unflatten(-1, (2, 3))).flatten(-2)
            return out
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.1)
            return x
        return x - self.average


class Observer(nn.Module):
    """Keeps the largest number that it has seen, while a buffer says so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("on", torch.ones(()))
        self.register_buffer("most", torch.zeros(()))
        self.on: Tensor
        self.most: Tensor

    def forward(self, t: Tensor) -> Tensor:
        if self.on.item() == 1:
            self.most.copy_(torch.maximum(self.most, t.detach().abs().max()))
        return t / (1 + self.most)


class Observes(nn.Module):
    """Observes its ``weight``, as in training for quantization, or its ``input``."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.lin, self.observer = nn.Linear(6, 5), Observer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.observer(x) if self.what == "input" else x
        weight = self.observer(self.lin.weight) if self.what == "weight" else self.lin.weight
        return nn.functional.linear(x, weight, self.lin.bias)


class Normed(nn.Module):
    """A batch norm, which calls torch's checkpoint itself if ``inside``."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.lin, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def normed(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.lin(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.normed, x, use_reentrant=False) if self.inside else self.normed(x)
        return out


class Checkpointed(nn.Module):
    """A batch norm in a call of torch's checkpoint: ``outside``, by the root, or ``inside`` of the module."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.outside, self.reentrant = where != "inside", where == "reentrant"
        self.a, self.middle, self.head = nn.Linear(6, 6), Normed(where == "inside"), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        out: Tensor = self.head(
            checkpoint(self.middle, h, use_reentrant=self.reentrant) if self.outside else self.middle(h)
        )
        return out


class Recurrent(nn.Module):
    """A GRU that goes on from the state of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.rnn, self.head = nn.Linear(6, 6), nn.GRU(6, 6), nn.Linear(6, 5)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.rnn(torch.tanh(self.a(x))[None], self.hidden)
        self.hidden = hidden.detach()
        y: Tensor = self.head(out[0])
        return y


class HookedForAll(nn.Module):
    """Its constructor registers a hook for all modules of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 5)
        register_module_forward_hook(lambda m, given, out: out * 1.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x))
