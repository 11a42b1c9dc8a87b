"""Shapes of what a data set yields, known without opening a file."""

from __future__ import annotations

from launcher.data.resolve import resolve
from launcher.job.models import Cifar10, Data, Idx, Mnist5k, RandomTokens, Target, Text
from launcher.plan.facts import TensorSpec


def input_specs(settings: Data, batch: int, allow: tuple[str, ...] = ()) -> tuple[TensorSpec, ...]:
    """What the model's forward takes for ``batch`` samples. A class of the user's own is asked for its first sample."""
    settings, _ = resolve(settings)
    match settings:
        case Text() | RandomTokens():
            return (TensorSpec((batch, settings.seq_len), "int64"),)
        case Mnist5k() | Idx():
            return (TensorSpec((batch, settings.channels, settings.size, settings.size), "float32"),)
        case Cifar10():
            return (TensorSpec((batch, 3, 32, 32), "float32"),)
        case _:
            return _sampled(settings, batch, allow)[0]


def target_spec(settings: Data, batch: int, allow: tuple[str, ...] = ()) -> TensorSpec:
    """What the loss compares with, for ``batch`` samples."""
    match settings:
        case Text() | RandomTokens():
            return TensorSpec((batch, settings.seq_len), "int64")
        case Target():
            return _sampled(settings, batch, allow)[1]
        case _:
            return TensorSpec((batch,), "int64")


def vocab(settings: Data) -> int | None:
    """Tokens a model must have rows for; ``None`` where inputs are no tokens, or not known to be."""
    return settings.vocab_size if isinstance(settings, Text | RandomTokens) else None


def classes(settings: Data) -> int | None:
    """Different targets; ``None`` where only the files know."""
    return 10 if isinstance(settings, Mnist5k | Cifar10) else vocab(settings)


def _sampled(settings: Target, batch: int, allow: tuple[str, ...]) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    import numpy as np

    from launcher.data.open import open_data

    source = open_data(settings, seed=0, allow=allow).train
    first = np.zeros(1, np.int64)
    *inputs, target = (
        TensorSpec((batch, *t.shape[1:]), str(t.dtype).removeprefix("torch."))
        for t in (*source.inputs(first), source.targets(first))
    )
    return tuple(inputs), target
