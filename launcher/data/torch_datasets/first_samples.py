"""Reads the first samples of a user's data set, and determines and checks their shapes and dtypes."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from launcher.data.source import Source
from launcher.data.torch_datasets.items import problems
from launcher.data.torch_datasets.open import opened as open_own
from launcher.errors import Problem, RequestError
from launcher.job.schema.user_class import Target
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.user_errors import owned

SOME = 2
"""The number of samples that are read from a user's class. Two are enough to check the batch dim."""


def sample_specs(
    settings: Target, batch: int, allow: tuple[str, ...]
) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """Returns the specs of the inputs and of the target, for ``batch`` samples. Raises ``RequestError``."""
    opened = open_own(settings, seed=0, allow=allow)
    with owned("data._target_", f"{settings.target}: its samples cannot be counted"):
        samples = len(opened.train)
    if not samples:
        text = "its split train has no samples, so there is nothing to train on"
        cure = "its len() must be the number of samples"
        raise RequestError((Problem("data", f"{settings.target}: {text}; {cure}"),))
    with problems():
        inputs, target = _first(opened.train, settings.target, batch)
        val = _first(opened.val, settings.target, batch) if len(opened.val) else (inputs, target)
    if val != (inputs, target):
        text = f"samples of the split train are {_formats(inputs, target)}, of val {_formats(*val)}"
        why = "both splits must have the same kind"
        raise RequestError((Problem("data", f"{settings.target}: {text}; {why}"),))
    return inputs, target


def _first(source: Source, name: str, batch: int) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """Returns the specs of ``batch`` samples, from the first ones of ``source``. Raises ``RequestError``."""
    with owned("data._target_", f"{name}: its samples cannot be counted"):
        n = min(SOME, max(1, len(source)))
    with owned("data._target_", f"{name}: its samples cannot be read"):
        inputs, target = source.inputs(np.arange(n)), source.targets(np.arange(n))

    # each input and the targets must be one tensor, samples along dim 0
    if not isinstance(inputs, tuple | list):
        text = f"inputs() returns {type(inputs).__name__}"
        cure = "return a tuple with one tensor for each input of the model"
        raise RequestError((Problem("data", f"{name}: {text}; {cure}"),))
    for method, t in (*(("inputs", t) for t in inputs), ("targets", target)):
        if not isinstance(t, Tensor):
            text = f"{method}() returns {type(t).__name__} where a tensor was expected"
            raise RequestError((Problem("data", f"{name}: {text}"),))
        if t.shape[:1] != (n,):
            text = f"{method}() of {n} indices returns a tensor of shape {tuple(t.shape)}"
            cure = "dim 0 must be the samples: return one for each index, in order"
            raise RequestError((Problem("data", f"{name}: {text}; {cure}"),))

    # replace dim 0 with the batch size
    *specs, last = [
        TensorSpec((batch, *t.shape[1:]), str(t.dtype).removeprefix("torch.")) for t in (*inputs, target)
    ]
    return tuple(specs), last


def _formats(inputs: tuple[TensorSpec, ...], target: TensorSpec) -> str:
    return " -> ".join(
        (", ".join(f"{t.dtype} {t.shape[1:]}" for t in inputs), f"{target.dtype} {target.shape[1:]}")
    )
