"""Shapes and dtypes of samples, and whether a model takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.data.checks import resolve
from launcher.data.model_tokenizer import check_tokenizer
from launcher.errors import Problem, RequestError
from launcher.job.schema.components import (
    AutoParallelMLP,
    Chat,
    Cifar10,
    Data,
    HuggingFace,
    Idx,
    ImageFolder,
    LanguageModel,
    Mnist5k,
    Model,
    RandomTokens,
    ResNet,
    Target,
    Text,
    TiedPair,
    Tokens,
    apart,
)
from launcher.optional import image_files
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.user_errors import owned

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
        return len(image_files.class_folders(settings.root)) or None
    return 10 if isinstance(settings, Mnist5k | Cifar10) else vocab(settings)


def _sampled(
    settings: Target, batch: int, allow: tuple[str, ...]
) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    from launcher.data.torch_datasets.items import problems
    from launcher.data.torch_datasets.open import opened as open_own

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


OwnModel = LanguageModel | TiedPair | ResNet | AutoParallelMLP
OwnData = Text | Mnist5k | Idx | Cifar10 | ImageFolder | RandomTokens | Tokens | Chat


def check_fit(model: Model, data: Data) -> list[Problem]:
    """Problems of the pair; few if either is a user's own class. Opens no files except tokenizers."""
    if isinstance(model, Target):
        return []
    if isinstance(model, HuggingFace):
        model_kind, wants = f"hf of task {model.task}", model.task == "causal_lm"
        return (
            []
            if isinstance(data, Target)
            else [*_kind(model_kind, wants, data), *check_tokenizer(model, data)]
        )
    return list(_unsaid(model) if isinstance(data, Target) else _fit(model, data))


def _unsaid(model: OwnModel) -> Iterator[Problem]:
    """Reports a missing vocabulary size: a user's own data class does not tell how many tokens it has."""
    if isinstance(model, LanguageModel | TiedPair) and model.vocab_size is None:
        text = "null: your own data class does not say how many tokens there are; give the number"
        yield Problem("model.vocab_size", text)


def _fit(model: OwnModel, data: OwnData) -> Iterator[Problem]:
    tokens, wants = vocab(data), isinstance(model, LanguageModel | TiedPair)
    if unlike := [*_kind(model.name, wants, data)]:
        yield from unlike
    elif (documents := apart(data)) is not None and not isinstance(model, LanguageModel):
        text = f"{documents.value}: model {model.name} takes only tokens and cannot separate documents"
        yield Problem(documents.key, text, documents.cure)
    elif isinstance(model, LanguageModel | TiedPair):
        yield from _enough("vocab_size", model.vocab_size, tokens, noun=f"tokens of data {data.name}")
    else:
        yield from _images(model, data)
        yield from _enough("classes", model.classes, classes(data), noun=f"classes of data {data.name}")


def _kind(model_kind: str, wants: bool, data: OwnData) -> Iterator[Problem]:
    """Reports a model that reads tokens and data that are images, or the reverse.

    ``model_kind``: the model; ``wants``: it reads tokens.
    """
    if wants != isinstance(data, Text | RandomTokens | Tokens | Chat):
        kinds = ("images", "tokens")
        yield Problem(
            "model", f"model {model_kind} reads {kinds[wants]}, data {data.name} has {kinds[not wants]}"
        )


def _enough(field: str, have: int | None, need: int | None, noun: str) -> Iterator[Problem]:
    """Reports a size that is too small. If one is unknown, the checks of the data's files report why."""
    if have is not None and need is not None and have < need:
        text = f"{have} are too few for the {need} {noun}"
        yield Problem(f"model.{field}", text, f"model.{field}={need}")


def _images(model: ResNet | AutoParallelMLP, data: OwnData) -> Iterator[Problem]:
    _, channels, height, width = input_specs(data, 1)[0].shape
    field, need = "features", channels * height * width
    if isinstance(model, ResNet):
        field, need = "channels", channels
    have = getattr(model, field)
    if have != need:
        text = f"{have} does not fit data {data.name}, whose images are {channels} x {height} x {width}"
        yield Problem(f"model.{field}", text, f"model.{field}={need}")
