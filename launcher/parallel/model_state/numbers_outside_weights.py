"""Finds the numbers that a model keeps outside of its weights, such as a counter of its forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from launcher.parallel.model_state.deep_copy import TORCH_ATTRIBUTES
from launcher.parallel.model_state.module_globals import globals_of


@dataclass(frozen=True)
class Count:
    """A number, and the function that sets it."""

    value: Any
    set: Callable[[Any], object]


def counts(model: nn.Module, names: Iterable[str]) -> dict[tuple[str, str], Count]:
    """Return numbers in attributes, in dicts among them, in one-element buffers and in files ``names``."""
    out: dict[tuple[str, str], Count] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in TORCH_ATTRIBUTES:
                continue
            if _is_number(value):
                out[path, name] = Count(value, partial(setattr, module, name))
            elif type(value) is dict:
                inside = [(k, v) for k, v in value.items() if _is_number(v)]
                out |= {(path, f"{name}[{k!r}]"): Count(v, partial(value.__setitem__, k)) for k, v in inside}
        for name, t in module._buffers.items():
            if t is not None and t.numel() == 1 and t.dtype is not torch.bool and not t.is_complex():
                out[path, name] = Count(t.item(), partial(_fill, t))
    for owner, key, value in globals_of(names):
        if _is_number(value):
            out[f"{owner!r}", key] = Count(value, partial(setattr, owner, key))
    return out


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _fill(t: torch.Tensor, value: Any) -> None:
    with torch.no_grad():
        t.fill_(value)
