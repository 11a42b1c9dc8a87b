"""Nets whose forward changes weights, or what requires a gradient, at one of its calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def freeze(layer: nn.Linear) -> None:
    layer.weight.requires_grad_(False)


def halve(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5)


def replace(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 0.5


def write(layer: nn.Linear) -> None:
    """Changes the weight in place without a new version for autograd."""
    layer.weight.data.mul_(0.5)


CHANGES: dict[str, Callable[[nn.Linear], None]] = {f.__name__: f for f in (freeze, halve, replace, write)}


class Changing(nn.Linear):
    """Makes the ``change`` at call ``at``; at every call if ``at`` is 0."""

    def __init__(self, change: str, at: int) -> None:
        super().__init__(6, 6)
        self.change, self.at, self.calls = change, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at or not self.at:
            CHANGES[self.change](self)
        return super().forward(x)


class Restarting(nn.Linear):
    """At call ``at`` it overwrites ``what`` from its samples: a weight, a buffer that it adds, or a number."""

    middle: Tensor
    passing: Tensor

    def __init__(self, what: str, at: int) -> None:
        super().__init__(6, 6)
        self.what, self.at, self.calls = what, at, 0
        self.register_buffer("middle", torch.zeros(6))
        self.register_buffer("passing", torch.zeros(6), persistent=False)
        self.number, self.loud, self.names = 0.0, False, ["a"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            self.restart(x)
        return super().forward(x + self.middle + self.passing + self.number)

    @torch.no_grad()
    def restart(self, x: Tensor) -> None:
        if self.what == "number":
            self.number = x.mean().item()
        elif self.what == "same on all":
            self.loud, self.names = True, [*self.names, "b"]
        else:
            {"weight": self.weight, "middle": self.middle, "passing": self.passing}[self.what].copy_(x.mean(0))


class Restarts(nn.Module):
    def __init__(self, what: str, at: int) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), Restarting(what, at), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.b(self.a(x)))
        return out


class Settings:
    """An object that several modules have."""

    def __init__(self) -> None:
        self.phase = "warm"
        self.scales: dict[str, Tensor] = {}


FLAGS: set[str] = set()
SEEN: set[str] = set()
SCALE = torch.ones(3)


class Announces(nn.Linear):
    """Sets a flag for other modules at call ``at``: in a global set, or in the settings that all have.

    The flag may also be a tensor: in a variable, in an attribute, or in the settings. A record is stored, and
    nothing depends on it.
    """

    def __init__(self, settings: Settings, way: str, at: int, scale: Tensor) -> None:
        super().__init__(6, 6)
        self.settings, self.way, self.at, self.calls, self.scale = settings, way, at, 0, scale

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at and self.way == "variable":
            FLAGS.add("main")
        elif self.calls == self.at and self.way == "a record":
            SEEN.add("b")
        elif self.calls == self.at and self.way == "tensor in a variable":
            SCALE.data.fill_(2)
        elif self.calls == self.at and self.way == "tensor":
            self.scale.fill_(2)
        elif self.calls == self.at and self.way == "tensor in an object":
            self.settings.scales["main"] = 2 * self.settings.scales["main"]
        elif self.calls == self.at:
            self.settings.phase = "main"
        return super().forward(x)


class Obeys(nn.Linear):
    """Doubles its result once the flag is set."""

    def __init__(self, settings: Settings, scale: Tensor, width: int = 3) -> None:
        super().__init__(6, width)
        self.settings, self.scale = settings, scale

    def forward(self, x: Tensor) -> Tensor:
        if FLAGS:
            SEEN.add("head")
        x = super().forward(x) * (2 if FLAGS or self.settings.phase == "main" else 1)
        return x * SCALE.to(x).mean() * self.scale.to(x).mean()


class ObeysTable(Obeys):
    """Also multiplies by a tensor in the settings, which its first forward makes."""

    def forward(self, x: Tensor) -> Tensor:
        if "main" not in self.settings.scales:
            self.settings.scales["main"] = torch.ones(3)
        return super().forward(x) * self.settings.scales["main"].to(x).mean()


class Flags(nn.Module):
    def __init__(self, way: str, at: int) -> None:
        super().__init__()
        settings, scale = Settings(), torch.ones(3)
        self.a, self.b, self.head = nn.Linear(6, 6), Announces(settings, way, at, scale), Obeys(settings, scale)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.b(self.a(x)))
        return out


class Log:
    """Counts gradients, as a backward hook of several modules."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: nn.Module, before: object, after: object) -> None:
        self.count += 1


class Logged(nn.Linear):
    """Has a log, and counts itself, in the backward; no forward reads that."""

    def __init__(self, log: Log, width: int) -> None:
        super().__init__(6, width)
        self.log, self.seen = log, 0
        self.register_full_backward_hook(log)
        self.register_full_backward_hook(self.look)

    def look(self, module: nn.Module, before: object, after: object) -> None:
        self.seen += 1


class LogsGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        log = Log()
        self.a, self.b, self.head = nn.Linear(6, 6), Logged(log, 6), Logged(log, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.b(self.a(x)))
        return out


class FlagsAfter(nn.Module):
    """The flag is set after a module has read it, and before its backward."""

    def __init__(self, way: str, at: int) -> None:
        super().__init__()
        settings, scale = Settings(), torch.ones(3)
        self.a, self.b, self.head = ObeysTable(settings, scale, 6), Announces(settings, way, at, scale), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.b(self.a(x)))
        return out


class Changes(nn.Module):
    def __init__(self, change: str, at: int) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), Changing(change, at), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.b(self.a(x)))
        return out


class Thawing(nn.Module):
    """A layer without gradients in its first ``at`` calls."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.linear, self.at, self.calls = nn.Linear(6, 6), at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.calls > self.at):
            return self.linear(x)


class Thaws(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.a, self.head = Thawing(at), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x)))
