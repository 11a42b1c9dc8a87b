"""Shapes and dtypes of what a forward is given and returns."""

from __future__ import annotations

from typing import Any

import torch

from launcher.plan.values.facts import TensorSpec

Specs = tuple[TensorSpec, ...] | None
"""``None`` of what is no tensor, nor several."""


def spec(t: torch.Tensor) -> TensorSpec:
    """Shape and dtype of ``t`` (of the whole tensor, for a DTensor)."""
    return TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))


def specs(value: Any) -> tuple[Specs, bool]:
    """Of what a module or a function returns, and whether that is several tensors in one."""
    if isinstance(value, torch.Tensor):
        return (spec(value),), False
    if isinstance(value, tuple | list) and value and all(isinstance(v, torch.Tensor) for v in value):
        return tuple(map(spec, value)), True
    return None, False


def output_specs(value: Any) -> tuple[Specs, bool, tuple[str | int, ...]]:
    """The same of what a whole model returns, and where in it each of several tensors is.

    Several are in a plain tuple, list or dict: a loss would get a named tuple without its names.
    """
    if type(value) is dict and all(isinstance(key, str) for key in value):
        found, packed = specs([*value.values()])
        return found, packed, tuple(value) if packed else ()
    found, packed = specs(value)
    if packed and type(value) not in (tuple, list):
        return None, False, ()
    return found, packed, tuple(range(len(value))) if packed else ()
