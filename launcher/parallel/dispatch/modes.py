"""Context managers for evaluation mode and the default dtype, and the base of our dispatch modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Dispatch(TorchDispatchMode):
    """Never compiled; saying so spares the import of torch._dynamo, a second of every plan."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Every module in evaluation mode, afterwards in the mode that it was in.

    ``model.train()`` alone would wake up what its owner has put to sleep, a frozen BatchNorm for one.
    """
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
