"""Finds the numbers that a model keeps outside of its weights, such as a counter of its forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from launcher.parallel.model_state.deep_copy import TORCH_ATTRIBUTES, copied
from launcher.parallel.model_state.module_globals import globals_of

AGES = 10, 1_000, 1_000_000
"""If a model counts its forwards, it is also tested after this many more of them."""

Key = tuple[str, str]
"""The owner of a number, and its name there."""


@dataclass(frozen=True)
class Count:
    """A number, and the function that sets it."""

    value: Any
    set: Callable[[Any], object]


def counts(model: nn.Module, names: Iterable[str]) -> dict[Key, Count]:
    """Returns numbers in attributes, in dicts among them, in one-element buffers and in files ``names``."""
    out: dict[Key, Count] = {}
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
            if (
                t is not None
                and not t.is_meta
                and t.numel() == 1
                and t.dtype is not torch.bool
                and not t.is_complex()
            ):
                out[path, name] = Count(t.item(), partial(_fill, t))
    for owner, key, value in globals_of(names):
        if _is_number(value):
            out[f"{owner!r}", key] = Count(value, partial(setattr, owner, key))
    return out


def aged(
    model: nn.Module, names: Iterable[str], before: Mapping[Key, Any], after: Mapping[Key, Any]
) -> Iterator[tuple[int, nn.Module]]:
    """Yields copies of a model that counts its calls, as after each number of further calls in ``AGES``.

    ``before`` and ``after`` are its ``values`` at the ends of two calls. Counts in the files ``names`` are
    set there; the caller restores them.
    """
    steps = {k: v - before[k] for k, v in after.items() if k in before and v != before[k]}
    for age in AGES if steps else ():
        older = copied(model)
        now = counts(older, names)
        for key, step in steps.items():
            now[key].set(type(now[key].value)(after[key] + age * step))
        yield age, older


def values(model: nn.Module, names: Iterable[str]) -> dict[Key, Any]:
    """Returns the values of all ``counts``."""
    return {key: count.value for key, count in counts(model, names).items()}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _fill(t: torch.Tensor, value: Any) -> None:
    with torch.no_grad():
        t.fill_(value)
