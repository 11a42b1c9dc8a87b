"""Determines shapes and dtypes of samples, and checks that a model takes them."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.data.check_model_tokenizer import check_tokenizer
from launcher.data.cifar10_fallback import resolve
from launcher.errors import Problem
from launcher.job.schema.components import Data, Model
from launcher.job.schema.data import (
    Chat,
    Cifar10,
    Idx,
    ImageFolder,
    Mnist5k,
    RandomTokens,
    Text,
    Tokens,
    apart,
)
from launcher.job.schema.models import AutoParallelMLP, HuggingFace, LanguageModel, ResNet, TiedPair
from launcher.job.schema.user_class import Target
from launcher.optional import image_files
from launcher.plan.values.tensor_spec import TensorSpec


def input_specs(settings: Data, batch: int, allow: tuple[str, ...] = ()) -> tuple[TensorSpec, ...]:
    """Returns the specs of the arguments of the model's forward for ``batch`` samples.

    It reads the first samples of a user's own class.
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
            from launcher.data.torch_datasets.first_samples import sample_specs  # imports torch

            return sample_specs(settings, batch, allow)[0]


def target_spec(settings: Data, batch: int, allow: tuple[str, ...] = ()) -> TensorSpec:
    """Returns the spec of the targets of the loss, for ``batch`` samples."""
    match settings:
        case Text() | RandomTokens() | Tokens() | Chat():
            return TensorSpec((batch, settings.seq_len), "int64")
        case Target():
            from launcher.data.torch_datasets.first_samples import sample_specs  # imports torch

            return sample_specs(settings, batch, allow)[1]
        case _:
            return TensorSpec((batch,), "int64")


def vocab(settings: Data) -> int | None:
    """Returns the size of the vocabulary; ``None`` if it is unknown or the inputs are not tokens."""
    return settings.vocab_size if isinstance(settings, Text | RandomTokens | Tokens | Chat) else None


def classes(settings: Data) -> int | None:
    """Returns the number of different targets; ``None`` if it is unknown without reading files."""
    if isinstance(settings, ImageFolder):
        return len(image_files.class_folders(settings.root)) or None
    return 10 if isinstance(settings, Mnist5k | Cifar10) else vocab(settings)


OwnModel = LanguageModel | TiedPair | ResNet | AutoParallelMLP
OwnData = Text | Mnist5k | Idx | Cifar10 | ImageFolder | RandomTokens | Tokens | Chat


def check_fit(model: Model, data: Data) -> list[Problem]:
    """Returns the problems of this model with this data. Opens no files except tokenizers.

    Most checks are skipped if either is a user's own class.
    """
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
    """Yields a problem if the vocabulary size is missing: a user's own data class does not define it."""
    if isinstance(model, LanguageModel | TiedPair) and model.vocab_size is None:
        text = "null: your own data class does not define the number of tokens; set it here"
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
    """Yields a problem if the model reads tokens and the data has images, or the reverse.

    ``model_kind`` names the model in messages; ``wants`` says whether it reads tokens.
    """
    if wants != isinstance(data, Text | RandomTokens | Tokens | Chat):
        kinds = ("images", "tokens")
        yield Problem(
            "model", f"model {model_kind} reads {kinds[wants]}, data {data.name} has {kinds[not wants]}"
        )


def _enough(field: str, have: int | None, need: int | None, noun: str) -> Iterator[Problem]:
    """Yields a problem if a size is too small. If one is unknown, the checks of the files report why."""
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
