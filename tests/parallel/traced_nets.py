"""Nets whose code between the modules checks how it is run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.parallel.python_state_nets import Net


class Asks(Net):
    """A factor depends on ``way``, whose answer may differ between a trace and a plain forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.b(self.a(x))
        if WAYS[self.way](h):
            h = h * 2
        return self.head(h)


WAYS: dict[str, Any] = {
    "has_torch_function": lambda h: torch.overrides.has_torch_function((h,)),
    "a function mode": lambda h: torch.overrides._get_current_function_mode() is not None,
    "is_meta": lambda h: h.is_meta,
    "device": lambda h: h.device.type == "meta",
    "the default device": lambda h: torch.empty(0).device.type == "meta",
    "is_compiling": lambda h: torch.compiler.is_compiling(),
    "grad mode": lambda h: torch.is_grad_enabled(),
}


class Projects(Net):
    """A hook stores a gradient for another one, as gradient surgery between tasks does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        one, other = h.clone(), h.clone()
        seen: dict[str, Tensor] = {}
        if h.requires_grad:
            one.register_hook(lambda grad: seen.update(grad=grad))
            other.register_hook(lambda grad: grad - 0.5 * seen["grad"] if "grad" in seen else grad)
        return self.head(one) + self.head(other * 2)


class Draws(Net):
    """Noise between the modules, and a module that is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.head(self.b(h + torch.randn_like(h)))
