"""A small model, and values for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """The call ``run(*modules, *inputs)``."""

    run: Callable[..., Any]
    inputs: Sequence[Tensor]
    modules: Sequence[nn.Module] = ()


class Calls(nn.Module):
    """A module that calls the function of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.run = case.run
        self.parts = nn.ModuleList(case.modules)

    def forward(self, *inputs: Tensor) -> Any:
        with torch.device(inputs[0].device):
            return self.run(*self.parts, *inputs)


def real(*shape: int) -> Tensor:
    """Return numbers around zero, none of them near to zero or to another one."""
    count = torch.Size(shape).numel()
    spread = torch.randperm(count, generator=torch.Generator().manual_seed(count)).double() - (count - 1) / 2 + 0.1
    return (spread * (1.8 / max(count, 2))).view(shape).requires_grad_()


def positive(*shape: int) -> Tensor:
    """Return numbers between 0.05 and 1."""
    return (real(*shape).detach() / 2 + 0.5).clamp(0.05, 0.99).requires_grad_()


def fixed(x: Tensor) -> Tensor:
    return x.detach()


def index(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(below + len(shape)))


def module(cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Return a module whose parameters are not zeros and ones."""
    made = cls(*args, dtype=torch.float64, **kwargs)
    with torch.no_grad():
        for name, t in (*made.named_parameters(), *made.named_buffers()):
            if t.is_floating_point():
                t.copy_(positive(*t.shape) if "var" in name else real(*t.shape))
    return made
