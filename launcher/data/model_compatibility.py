"""Checks that a model can read the samples of a data set."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.data.model_tokenizer import check_tokenizer
from launcher.data.spec import classes, input_specs, vocab
from launcher.errors import Problem
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

OwnModel = LanguageModel | TiedPair | ResNet | AutoParallelMLP
OwnData = Text | Mnist5k | Idx | Cifar10 | ImageFolder | RandomTokens | Tokens | Chat


def check_fit(model: Model, data: Data) -> list[Problem]:
    """Problems of the pair; few if either is a user's own class. Opens no files except tokenizers."""
    if isinstance(model, Target):
        return []
    if isinstance(model, HuggingFace):
        said, wants = f"hf of task {model.task}", model.task == "causal_lm"
        return [] if isinstance(data, Target) else [*_kind(said, wants, data), *check_tokenizer(model, data)]
    return list(_unsaid(model) if isinstance(data, Target) else _fit(model, data))


def _unsaid(model: OwnModel) -> Iterator[Problem]:
    """Reports a missing vocabulary size: a user's own data class does not tell how many tokens it has."""
    if isinstance(model, LanguageModel | TiedPair) and model.vocab_size is None:
        text = "null: data of a class of your own does not say how many tokens there are; give their number"
        yield Problem("model.vocab_size", text)


def _fit(model: OwnModel, data: OwnData) -> Iterator[Problem]:
    tokens, wants = vocab(data), isinstance(model, LanguageModel | TiedPair)
    if unlike := [*_kind(model.name, wants, data)]:
        yield from unlike
    elif (documents := apart(data)) is not None and not isinstance(model, LanguageModel):
        text = f"{documents.value}: model {model.name} takes tokens alone, and no documents to keep apart"
        yield Problem(documents.key, text, documents.cure)
    elif isinstance(model, LanguageModel | TiedPair):
        yield from _enough("vocab_size", model.vocab_size, tokens, what=f"tokens of data {data.name}")
    else:
        yield from _images(model, data)
        yield from _enough("classes", model.classes, classes(data), what=f"classes of data {data.name}")


def _kind(said: str, wants: bool, data: OwnData) -> Iterator[Problem]:
    """Reports a model that reads tokens and data that are images, or the reverse.

    ``said``: the model; ``wants``: it reads tokens.
    """
    if wants != isinstance(data, Text | RandomTokens | Tokens | Chat):
        kinds = ("images", "tokens")
        yield Problem("model", f"model {said} reads {kinds[wants]}, data {data.name} has {kinds[not wants]}")


def _enough(field: str, have: int | None, need: int | None, what: str) -> Iterator[Problem]:
    """Reports a size that is too small. If one is unknown, the checks of the data's files report why."""
    if have is not None and need is not None and have < need:
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
