"""Restores what an evaluation has changed: tensors that the plan names, and Python attributes of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from launcher.parallel.model_state.deep_copy import OURS


@contextmanager
def untouched(models: Iterable[nn.Module], names: Iterable[str]) -> Iterator[None]:
    """Restore ``models`` on exit, to the last bit.

    Of the tensors, those of ``names`` that exist are restored. Of all modules, the attributes are restored,
    and the items of lists, dicts and sets among them, but nothing deeper.
    """
    names, models = tuple(names), tuple(models)
    tensors = [t for model in models for t in _tensors(model, names)]
    values = [(m, _values(m)) for model in models for m in model.modules()]
    try:
        yield
    finally:
        for module, before in values:
            _put_back(module, before)
        with torch.no_grad():
            for home, name, t, kept in tensors:
                home[name] = t
                t.copy_(kept)


def _tensors(
    model: nn.Module, names: tuple[str, ...]
) -> Iterator[tuple[Any, str, torch.Tensor, torch.Tensor]]:
    """Yield the dict that has each tensor, its name there, the tensor and a copy."""
    for path, module in model.named_modules(remove_duplicate=False) if names else ():
        for home in (module._parameters, module._buffers):
            for name, t in home.items():
                if t is not None and f"{path}.{name}".lstrip(".") in names:
                    yield home, name, t, t.detach().clone()


def _values(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the user's attributes of a module, with copies of the containers among them."""
    return {
        k: (v, type(v)(v) if type(v) in (list, dict, set) else None)
        for k, v in vars(module).items()
        if k not in OURS
    }


def _put_back(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    now = vars(module)
    for k in [k for k in now if k not in OURS and k not in before]:
        del now[k]
    for k, (value, inside) in before.items():
        now[k] = value
        if inside is not None:
            _fill(value, inside)


def _fill(value: Any, inside: Any) -> None:
    if isinstance(value, list):
        value[:] = inside
    else:
        value.clear()
        value.update(inside)
