"""Training and evaluation mode of a model whose modules are split over stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


def in_training(build: Callable[[], nn.Module]) -> nn.Module:
    """Returns a new model in the state in which a training loop begins: after ``model.train()``.

    If a module overrides ``_apply``, for example to keep a buffer in float32, this also has the effects that
    ``model.to(device)`` has on it.
    """
    model = build()
    if any(not type(m)._apply.__module__.startswith("torch.") for m in model.modules()):
        model._apply(lambda t: t)
    model.train()
    return model


def is_dropout(module: nn.Module) -> bool:
    """Returns true if ``module`` is one of torch's whose only draw is dropout, which can be turned off."""
    known = isinstance(module, nn.modules.dropout._DropoutNd | nn.MultiheadAttention)
    return known and type(module).forward.__module__.startswith("torch.")


@dataclass(frozen=True)
class Modes:
    """The flags of each module after ``train()`` and after ``eval()`` of the full model.

    A module may override ``train`` to keep a part in evaluation mode. Once it is split into stages, its own
    ``train`` can no longer be called: ``switch`` calls ``train`` of the parts, and then sets the flags that
    ``train`` of the full model has set.
    """

    flags: tuple[tuple[nn.Module, bool, bool], ...]

    @classmethod
    def from_model(cls, model: nn.Module, trial: nn.Module) -> Modes:
        """Reads the flags that the modules of ``model`` get, by switching ``trial``, a copy of it.

        ``model`` itself stays in training mode, because its ``train`` may count calls or merge weights.
        """
        trial.eval()
        evaluating = [m.training for m in trial.modules()]
        trial.train()
        training = [m.training for m in trial.modules()]
        return cls(tuple(zip(model.modules(), training, evaluating, strict=True)))

    def switch(self, parts: Iterable[nn.Module], training: bool) -> None:
        """Does to ``parts`` of the model what ``model.train(training)`` does."""
        for part in parts:
            part.train(training)
        for module, trains, evaluates in self.flags:
            module.training = trains if training else evaluates


@contextmanager
def evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Puts full models in evaluation mode; afterwards each module gets its previous mode again."""
    models = tuple(models)
    was = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in was:
            module.training = training
