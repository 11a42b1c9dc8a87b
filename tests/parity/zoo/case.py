"""The settings with which a model of the zoo runs: its stages, its inputs, its targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

D = 8
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A class of the zoo. ``units``: modules in call order, to be split evenly; if there are none, ``auto`` splits.

    ``rounds``: the tolerance if its operators are sharded, because some of it computes in float32.
    """

    cls: type[nn.Module]
    units: tuple[str, ...]
    inputs: tuple[tuple[Any, ...], ...] = ((D,),)
    classes: int = D
    target: tuple[int, ...] = ()
    ignored: bool = False
    optim: str = "sgd"
    needs: str | None = None
    forced: bool = False
    rounds: float | None = None

    @property
    def name(self) -> str:
        return self.cls.__name__

    @property
    def about(self) -> str:
        return (self.cls.__doc__ or "").split("\n")[0].rstrip(".")

    def config(self, stages: int) -> dict[str, int] | str:
        """``stage_config``: the units in order, as evenly as possible; ``auto`` if there are too few."""
        if len(self.units) < stages or stages == 1:
            return "auto"
        return {u: n * stages // len(self.units) for n, u in enumerate(self.units)}


def odd(*units: str, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a class under its name."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        case = replace(Case(cls, units), **options)
        assert case.name not in CASES, case.name
        CASES[case.name] = case
        return cls

    return register


def block(i: int = D, o: int = D) -> nn.Module:
    return nn.Sequential(nn.Linear(i, o), nn.Tanh())


class Net(nn.Module):
    """Four blocks in a row, ``a`` to ``d``; a subclass says what is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = block(), block(), block(), nn.Linear(D, D)
        self.extra()

    def extra(self) -> None:
        """Make more parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.d(self.c(self.b(self.a(x))))
        return out


ABCD = ("a", "b", "c", "d")


def tokens(*units: str, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a model of eight tokens, with sequences of six: it returns logits of each."""
    return odd(*units, **{"inputs": (("int64", 6),), "target": (6,), **options})


def sequence(*units: str, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a model of six vectors, which returns logits of each."""
    return odd(*units, **{"inputs": ((6, D),), "target": (6,), **options})


def image(*units: str, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    return odd(*units, **{"inputs": ((3, 8, 8),), **options})


def all_cases() -> dict[str, Case]:
    """Every model, in the order of the files."""
    from tests.parity.zoo import models

    models.load()
    return CASES


def chosen(names: Sequence[str]) -> list[Case]:
    every = all_cases()
    return [every[n] for n in names] if names else list(every.values())
