"""The choices of a request: the unions Model, Data, Loss, Metric, Optim and Schedule."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from launcher.job.schema.data import Chat, Cifar10, Idx, ImageFolder, Mnist5k, RandomTokens, Text, Tokens
from launcher.job.schema.models import (
    AutoParallelMLP,
    HuggingFace,
    LanguageModel,
    ModelTarget,
    ResNet,
    TiedPair,
)
from launcher.job.schema.objective import BCE, MSE, Accuracy, BitsPerByte, CrossEntropy, Perplexity, TopK
from launcher.job.schema.optim import (
    SGD,
    WSD,
    Adafactor,
    AdamW,
    Constant,
    Cosine,
    CosineRestarts,
    Linear,
    Lion,
    Momentum,
    Muon,
    Polynomial,
)
from launcher.job.schema.user_class import Target


def _kind(value: Any) -> str | None:
    """Returns the tag of a union member: ``_target_`` for a user's own class, otherwise its ``name``."""
    own = "_target_" in value if isinstance(value, dict) else isinstance(value, Target)
    if own:
        return "_target_"
    return value.get("name") if isinstance(value, dict) else getattr(value, "name", None)


def foreign(model: object) -> bool:
    """Returns true if a model's code is not ours: a user's own class, or one of transformers."""
    return isinstance(model, Target | HuggingFace)


_Own = Annotated[Target, Tag("_target_")]
Model = Annotated[
    Annotated[LanguageModel, Tag("lm")]
    | Annotated[ResNet, Tag("resnet")]
    | Annotated[AutoParallelMLP, Tag("mlp")]
    | Annotated[TiedPair, Tag("tied_pair")]
    | Annotated[HuggingFace, Tag("hf")]
    | Annotated[ModelTarget, Tag("_target_")],
    Discriminator(_kind),
]
Data = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Mnist5k, Tag("mnist5k")]
    | Annotated[Idx, Tag("idx")]
    | Annotated[Cifar10, Tag("cifar10")]
    | Annotated[ImageFolder, Tag("images")]
    | Annotated[RandomTokens, Tag("random_tokens")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[Chat, Tag("chat")]
    | _Own,
    Discriminator(_kind),
]
Loss = Annotated[
    Annotated[CrossEntropy, Tag("cross_entropy")]
    | Annotated[MSE, Tag("mse")]
    | Annotated[BCE, Tag("bce")]
    | _Own,
    Discriminator(_kind),
]
Metric = Annotated[
    Annotated[Accuracy, Tag("accuracy")]
    | Annotated[TopK, Tag("top_k")]
    | Annotated[Perplexity, Tag("perplexity")]
    | Annotated[BitsPerByte, Tag("bits_per_byte")]
    | _Own,
    Discriminator(_kind),
]
Optim = Annotated[
    Annotated[AdamW, Tag("adamw")]
    | Annotated[SGD, Tag("sgd")]
    | Annotated[Momentum, Tag("momentum")]
    | Annotated[Lion, Tag("lion")]
    | Annotated[Adafactor, Tag("adafactor")]
    | Annotated[Muon, Tag("muon")]
    | _Own,
    Discriminator(_kind),
]
Schedule = Annotated[
    Annotated[Constant, Tag("constant")]
    | Annotated[Cosine, Tag("cosine")]
    | Annotated[Linear, Tag("linear")]
    | Annotated[Polynomial, Tag("polynomial")]
    | Annotated[CosineRestarts, Tag("cosine_restarts")]
    | Annotated[WSD, Tag("wsd")]
    | _Own,
    Discriminator(_kind),
]
