"""Checks that a model can read the samples of a data set."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.data.spec import classes, input_specs, vocab
from launcher.errors import Problem
from launcher.job.schema.components import (
    AutoParallelMLP,
    Cifar10,
    Data,
    HuggingFace,
    Idx,
    LanguageModel,
    Mnist5k,
    Model,
    RandomTokens,
    ResNet,
    Target,
    Text,
    TiedPair,
)

OwnModel = LanguageModel | TiedPair | ResNet | AutoParallelMLP
OwnData = Text | Mnist5k | Idx | Cifar10 | RandomTokens


def check_fit(model: Model, data: Data) -> list[Problem]:
    """Problems of the pair; none where either is a class of the user's own. Opens no file."""
    return (
        [] if isinstance(model, Target | HuggingFace) or isinstance(data, Target) else list(_fit(model, data))
    )


def _fit(model: OwnModel, data: OwnData) -> Iterator[Problem]:
    tokens, wants = vocab(data), isinstance(model, LanguageModel | TiedPair)
    if wants != (tokens is not None):
        kinds = ("images", "tokens")
        text = f"model {model.name} reads {kinds[wants]}, data {data.name} has {kinds[not wants]}"
        yield Problem("model", text)
    elif isinstance(model, LanguageModel | TiedPair):
        yield from _enough("vocab_size", model.vocab_size, tokens, what=f"tokens of data {data.name}")
    else:
        yield from _images(model, data)
        yield from _enough("classes", model.classes, classes(data), what=f"classes of data {data.name}")


def _enough(field: str, have: int, need: int | None, what: str) -> Iterator[Problem]:
    if need is not None and have < need:
        text = f"{have} are too few for the {need} {what}"
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
