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
    """A dispatch mode that is never compiled.

    Saying so avoids the import of torch._dynamo, a second per plan.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def in_training(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a new model as a training loop begins with it: after ``model.train()``.

    ``model.to(device)`` has its effects too, for modules that override ``_apply``, such as to keep a buffer
    in float32.
    """
    model = build()
    if any(not type(m)._apply.__module__.startswith("torch.") for m in model.modules()):
        model._apply(lambda t: t)
    model.train()
    return model


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for n, a in enumerate(func._schema.arguments):
        if a.name in ("dropout", "dropout_p"):
            return bool(args[n] if n < len(args) else kwargs.get(a.name, a.default_value))
    return True


def is_dropout(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's whose only draw is dropout, which can be turned off."""
    known = isinstance(module, nn.modules.dropout._DropoutNd | nn.MultiheadAttention)
    return known and type(module).forward.__module__.startswith("torch.")


@dataclass(frozen=True)
class Modes:
    """The flags of each module after ``train()`` and after ``eval()`` of the full model.

    A module may override ``train`` to keep a part in evaluation mode. Once it is split into stages, its own
    ``train`` can no longer be called: ``switch`` calls that of its parts, and then sets the flags that it
    gave them.
    """

    flags: tuple[tuple[nn.Module, bool, bool], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Modes:
        """Read the flags of ``model``; leaves it in training mode."""
        modules = tuple(model.modules())
        model.eval()
        evaluating = [m.training for m in modules]
        model.train()
        return cls(tuple((m, m.training, e) for m, e in zip(modules, evaluating, strict=True)))

    def switch(self, parts: Iterable[nn.Module], training: bool) -> None:
        """Do to ``parts`` of the model what ``model.train(training)`` does."""
        for part in parts:
            part.train(training)
        for module, trains, evaluates in self.flags:
            module.training = trains if training else evaluates


@contextmanager
def evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put full models in evaluation mode; afterwards each module gets its previous mode again."""
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
    """Give new floating-point tensors ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
