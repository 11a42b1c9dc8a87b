"""Builds a model from its settings."""

from __future__ import annotations

from torch import nn

from launcher.job.schema.components import Model
from launcher.job.schema.models import AutoParallelMLP, HuggingFace, LanguageModel, ResNet, TiedPair
from launcher.models.defaults import resolve
from launcher.models.language_model import Decoder
from launcher.models.lora import adapt
from launcher.models.small import EmbeddingAndHead, Network, ResidualNetwork


def build_model(settings: Model, allow: tuple[str, ...] = ()) -> nn.Module:
    """Builds the model on the default device (``meta`` too) in the default dtype.

    ``allow`` lists the packages that ``_target_`` may name.
    """
    settings, _ = resolve(settings)
    made = _without_adapters(settings, allow)
    return made if settings.lora is None else adapt(made, settings.lora)


def _without_adapters(settings: Model, allow: tuple[str, ...]) -> nn.Module:
    match settings:
        case LanguageModel():
            return Decoder(settings)
        case ResNet():
            return ResidualNetwork(settings)
        case AutoParallelMLP():
            return Network(settings)
        case TiedPair():
            return EmbeddingAndHead(settings)
        case HuggingFace():
            from launcher.models.hugging_face import from_folder

            return from_folder(settings)
        case _:
            from launcher.job.targets import build

            return build(settings, allow, nn.Module, key="model._target_")
