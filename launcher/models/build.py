"""Builds a model from its settings."""

from __future__ import annotations

import torch
from torch import nn

from launcher.job.schema.components import Model
from launcher.job.schema.models import AutoParallelMLP, HuggingFace, LanguageModel, ResNet, TiedPair
from launcher.models.defaults import resolve
from launcher.models.language_model import Decoder
from launcher.models.lora import adapt
from launcher.models.small import EmbeddingAndHead, Network, ResidualNetwork


def build_model(settings: Model, allow: tuple[str, ...] = ()) -> nn.Module:
    """Builds the model on the default device (``meta`` too) in the default dtype.

    If that is float64, a user's model is converted as by ``model.double()``. ``allow`` lists the packages
    that ``_target_`` may name.
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

            made = build(settings, allow, nn.Module, key="model._target_")
            if torch.get_default_dtype() == torch.float64:
                _double(made)
            return made


@torch.no_grad()
def _double(model: nn.Module) -> None:
    """Makes every floating-point parameter and buffer float64, in place: ties and hooks stay.

    A constructor may name a dtype, as ``torch.FloatTensor(3, 4)`` does.
    """
    for t in (*model.parameters(), *model.buffers()):
        if t.is_floating_point() and t.dtype != torch.float64:
            t.data = t.data.double()
