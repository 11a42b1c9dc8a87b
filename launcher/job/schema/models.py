"""Settings of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from launcher.job.schema.base import Flag, Number, Settings, Size
from launcher.job.schema.paths import FilePath
from launcher.job.schema.user_class import Target

MOST_LAYERS = 1000
"""The depth of DeepNet, the deepest model that has been published."""


def _few_layers(layers: int) -> int:
    """Refuses more layers than planning can trace in seconds."""
    if layers > MOST_LAYERS:
        raise ValueError(f"should be at most {MOST_LAYERS}: planning traces each layer")
    return layers


Layers = Annotated[int, Field(ge=1, strict=True), AfterValidator(_few_layers)]


class Lora(Settings):
    """Low-rank adapters (arXiv 2106.09685) of linear modules; all other weights are frozen.

    ``modules``: names or globs of linear modules, or of modules around them.
    """

    rank: Size = Field(description="rank of the adapters, for example 8")
    alpha: Number = Field(
        gt=0, allow_inf_nan=False, description="scale of the adapters is alpha / rank; for example 16"
    )
    modules: str | tuple[str, ...] = Field(
        min_length=1, description="names or globs, for example layers.*.attn"
    )


class ModelSettings(Settings):
    """Settings of every model. ``lora``: adapters that are trained instead of the full model."""

    lora: Lora | None = Field(None, description="{rank, alpha, modules}: trained adapters of linear modules")


class ModelTarget(ModelSettings, Target):
    """A user's own model; ``lora`` is not an argument of its class."""


class LanguageModel(ModelSettings):
    """A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    name: Literal["lm"]
    vocab_size: Size | None = Field(description="null: the vocabulary size of the data")
    dim: Size = 128
    layers: Layers = 4
    heads: Size = 4
    kv_heads: Size | None = None
    ffn_dim: Size | None = None
    tied: Flag = True
    rope_theta: Number = Field(10000.0, gt=0)
    norm_eps: Number = Field(1e-5, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        heads, dim, kv_heads = self.heads, self.dim, self.kv_heads
        if dim % heads or dim // heads % 2:
            fits = [n for n in range(1, dim // 2 + 1) if dim % (2 * n) == 0]
            advice = f"; use model.heads={_closest(fits, heads)}" if fits else ""
            raise ValueError(f"model.heads={heads} must cut model.dim={dim} into even-sized heads{advice}")
        if kv_heads is not None and heads % kv_heads:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            advice = f"use model.kv_heads={_closest(fits, kv_heads)}"
            raise ValueError(f"model.kv_heads={kv_heads} must divide model.heads={heads}; {advice}")
        return self


def _closest(numbers: Sequence[int], target: int) -> int:
    """Returns the closest of ``numbers``; the larger one of two that are equally close."""
    return min(numbers, key=lambda n: (abs(n - target), -n))


class ResNet(ModelSettings):
    """ResNet (He et al. 2015); ``stem: cifar`` is the 3x3 stem without pooling."""

    name: Literal["resnet"]
    depth: Literal[18, 34, 50] = 50
    classes: Size = 10
    stem: Literal["imagenet", "cifar"] = "cifar"
    channels: Size = 3
    width: Size = 64


class AutoParallelMLP(ModelSettings):
    """The network of AutoParallel's own example: flatten, layer1, relu1, layer2, relu2, layer3."""

    name: Literal["mlp"]
    features: Size = 784
    hidden: Size = 512
    classes: Size = 10


class TiedPair(ModelSettings):
    """A vocabulary embedding and a head that share one table: the smallest tied pipeline."""

    name: Literal["tied_pair"]
    vocab_size: Size | None = Field(description="null: the vocabulary size of the data")
    dim: Size = 64


class HuggingFace(ModelSettings):
    """A model folder of transformers: its ``config.json``, and its weights in safetensors if it has them."""

    name: Literal["hf"]
    path: FilePath
    weights: Flag = Field(
        True,
        description="true: start from the weights in the folder; false: initialize weights from the seed",
    )
    task: Literal["causal_lm", "image_classification"] = "causal_lm"
    config: dict[str, Any] = Field({}, description="keys that differ from config.json")
