"""Training and evaluation mode, the default dtype, and the base of our dispatch modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Dispatch(TorchDispatchMode):
    """Never compiled; saying so spares the import of torch._dynamo, a second of every plan."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def in_training(build: Callable[[], nn.Module]) -> nn.Module:
    """A new model as a loop begins with it: after ``model.train()``, whatever its maker left.

    And after ``model.to(device)``, where modules do something of their own then, as keep a buffer in float32.
    """
    model = build()
    if any(not type(m)._apply.__module__.startswith("torch.") for m in model.modules()):
        model._apply(lambda t: t)
    model.train()
    return model


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers: attention may, and does not where nothing is dropped."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for n, a in enumerate(func._schema.arguments):
        if a.name in ("dropout", "dropout_p"):
            return bool(args[n] if n < len(args) else kwargs.get(a.name, a.default_value))
    return True


def is_dropout(module: nn.Module) -> bool:
    """Whether it is a module of torch whose only draw is the dropout that it can be told to leave out."""
    known = isinstance(module, nn.modules.dropout._DropoutNd | nn.MultiheadAttention)
    return known and type(module).forward.__module__.startswith("torch.")


@dataclass(frozen=True)
class Modes:
    """What ``train()`` and ``eval()`` of a whole model make of each module: its flag in each of the two.

    A module may override ``train`` to keep a part in evaluation mode. Where it is cut into stages nobody can
    call its own ``train`` any more: its parts have theirs called, and then the flags that it gave them.
    """

    flags: tuple[tuple[nn.Module, bool, bool], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Modes:
        """Leaves ``model`` in training mode."""
        modules = tuple(model.modules())
        model.eval()
        evaluating = [m.training for m in modules]
        model.train()
        return cls(tuple((m, m.training, e) for m, e in zip(modules, evaluating, strict=True)))

    def switch(self, parts: Iterable[nn.Module], training: bool) -> None:
        """What ``model.train(training)`` does to the ``parts`` of the model that are here."""
        for part in parts:
            part.train(training)
        for module, trains, evaluates in self.flags:
            module.training = trains if training else evaluates


@contextmanager
def evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Whole models that are tried are in evaluation mode, afterwards each module in the one it was in."""
    models = tuple(models)
    was = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in was:
            module.training = training


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating tensors have ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
