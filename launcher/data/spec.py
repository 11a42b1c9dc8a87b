"""The shapes and dtypes of a data set's samples, without opening its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.data.fallback import resolve
from launcher.data.images.folder.listing import class_folders
from launcher.errors import Problem, RequestError, owned
from launcher.job.schema.components import (
    Chat,
    Cifar10,
    Data,
    Idx,
    ImageFolder,
    Mnist5k,
    RandomTokens,
    Target,
    Text,
    Tokens,
    apart,
)
from launcher.plan.values.facts import TensorSpec

if TYPE_CHECKING:
    from launcher.data.source import Source


def input_specs(settings: Data, batch: int, allow: tuple[str, ...] = ()) -> tuple[TensorSpec, ...]:
    """The arguments of the model's forward for ``batch`` samples.

    Reads the first samples of a user's own class.
    """
    settings, _ = resolve(settings)
    match settings:
        case Text() | RandomTokens():
            return (TensorSpec((batch, settings.seq_len), "int64"),)
        case Tokens() | Chat():
            return (TensorSpec((batch, settings.seq_len), "int64"),) * (1 if apart(settings) is None else 2)
        case Mnist5k() | Idx() | ImageFolder():
            return (TensorSpec((batch, settings.channels, settings.size, settings.size), "float32"),)
        case Cifar10():
            return (TensorSpec((batch, 3, 32, 32), "float32"),)
        case _:
            return _sampled(settings, batch, allow)[0]


def target_spec(settings: Data, batch: int, allow: tuple[str, ...] = ()) -> TensorSpec:
    """What the loss compares with, for ``batch`` samples."""
    match settings:
        case Text() | RandomTokens() | Tokens() | Chat():
            return TensorSpec((batch, settings.seq_len), "int64")
        case Target():
            return _sampled(settings, batch, allow)[1]
        case _:
            return TensorSpec((batch,), "int64")


def vocab(settings: Data) -> int | None:
    """The number of tokens that a model needs rows for; ``None`` if unknown or inputs are not tokens."""
    return settings.vocab_size if isinstance(settings, Text | RandomTokens | Tokens | Chat) else None


def classes(settings: Data) -> int | None:
    """The number of different targets; ``None`` if only the files tell."""
    if isinstance(settings, ImageFolder):
        return len(class_folders(settings.root)) or None
    return 10 if isinstance(settings, Mnist5k | Cifar10) else vocab(settings)


def _sampled(
    settings: Target, batch: int, allow: tuple[str, ...]
) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    from launcher.data.torch_datasets.items import refused
    from launcher.data.torch_datasets.open import opened as open_own

    opened = open_own(settings, seed=0, allow=allow)
    with owned("data._target_", f"{settings.target}: its samples cannot be counted"):
        samples = len(opened.train)
    if not samples:
        text = "its split train has no samples, so there is nothing to learn from or to plan for"
        cure = "let its len() be their number"
        raise RequestError((Problem("data", f"{settings.target}: {text}; {cure}"),))
    with refused():
        inputs, target = _first(opened.train, settings.target, batch)
        held = _first(opened.val, settings.target, batch) if len(opened.val) else (inputs, target)
    if held != (inputs, target):
        text = f"samples of the split train are {_said(inputs, target)}, of val {_said(*held)}"
        why = "the model is planned for one kind of samples"
        raise RequestError((Problem("data", f"{settings.target}: {text}; {why}"),))
    return inputs, target


SOME = 2
"""The number of samples read of a user's own class: two show which dim is that of samples."""


def _first(source: Source, name: str, batch: int) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """The specs of its first samples, with a batch dim of ``batch``. Raises ``RequestError``."""
    import numpy as np
    from torch import Tensor

    with owned("data._target_", f"{name}: its samples cannot be counted"):
        n = min(SOME, max(1, len(source)))
    with owned("data._target_", f"{name}: its samples cannot be read"):
        inputs, target = source.inputs(np.arange(n)), source.targets(np.arange(n))

    # each input and the targets must be one tensor, samples along dim 0
    if not isinstance(inputs, tuple | list):
        text = f"inputs() returns {type(inputs).__name__}"
        cure = "return a tuple, of one tensor for each input of the model"
        raise RequestError((Problem("data", f"{name}: {text}; {cure}"),))
    for what, t in (*(("inputs", t) for t in inputs), ("targets", target)):
        if not isinstance(t, Tensor):
            text = f"{what}() returns {type(t).__name__} where a tensor was expected"
            raise RequestError((Problem("data", f"{name}: {text}"),))
        if t.shape[:1] != (n,):
            text = f"{what}() of {n} indices returns a tensor of shape {tuple(t.shape)}"
            cure = "dim 0 is that of the samples: return one for each index, in their order"
            raise RequestError((Problem("data", f"{name}: {text}; {cure}"),))

    # replace dim 0 with the batch size
    *specs, last = [
        TensorSpec((batch, *t.shape[1:]), str(t.dtype).removeprefix("torch.")) for t in (*inputs, target)
    ]
    return tuple(specs), last


def _said(inputs: tuple[TensorSpec, ...], target: TensorSpec) -> str:
    return " -> ".join(
        (", ".join(f"{t.dtype} {t.shape[1:]}" for t in inputs), f"{target.dtype} {target.shape[1:]}")
    )
