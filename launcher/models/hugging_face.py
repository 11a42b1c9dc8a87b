"""Models of transformers, built from the ``config.json`` of a folder: tokens in, logits out."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from launcher.errors import Problem, RequestError
from launcher.job.schema.components import HuggingFace
from launcher.job.schema.similar_names import did_you_mean, nearest
from launcher.models.hugging_face_documents import arguments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


EXPERTS = "experts_implementation"
KERNELS = ("attn_implementation", EXPERTS)
"""Which ones run, and nothing of the model: they are in no ``config.json``."""


def from_folder(settings: HuggingFace) -> nn.Module:
    """With new weights, under the names that the folder's have.

    Nothing is fetched, and code that the folder brings along is not run. Raises ``RequestError``.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    config = config_of(settings)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        text = f"{settings.path}: transformers has no {settings.task} of a {config.model_type}"
        raise RequestError((Problem("model.path", text),))
    config.use_cache = False  # of generation
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())
    model.__class__ = _logits_only(type(model))  # type: ignore[arg-type]  # nn.Module has a __hash__
    return model


def config_of(settings: HuggingFace) -> PreTrainedConfig:
    """That of the folder, with what is to be otherwise."""
    from transformers import AutoConfig

    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    written = AutoConfig.from_pretrained(settings.path, **here)
    for key in settings.config:
        if not hasattr(written, key) and key not in KERNELS:
            known = [*written.to_dict(), *KERNELS]
            text = f"{type(written).__name__} of {settings.path} has none{did_you_mean(nearest(key, known))}"
            raise RequestError((Problem(f"model.config.{key}", text),))
    return AutoConfig.from_pretrained(settings.path, **here, **({EXPERTS: "eager"} | settings.config))


@cache
def _logits_only(cls: type[nn.Module]) -> type[nn.Module]:
    """The same class, whose forward takes tokens and returns the logits by themselves.

    ``documents``: which of those of a sample each token is of, where they are to be apart.
    """

    def forward(self: Any, input_ids: Tensor, documents: Tensor | None = None) -> Tensor:
        apart = {} if documents is None else arguments(self.config, documents)
        logits: Tensor = cls.forward(self, input_ids=input_ids, return_dict=False, **apart)[0]
        return logits

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def tp_plan(settings: HuggingFace) -> dict[str, str]:
    """How transformers cuts its modules over ``tp``: a style by glob; empty where it does not say.

    A head that is tied to the embedding is whole as that is: nothing is said of most embeddings.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = config_of(settings)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None or not config.base_model_tp_plan:
        return {}
    inside = {f"{cls.base_model_prefix}.{glob}": style for glob, style in config.base_model_tp_plan.items()}
    return inside if config.tie_word_embeddings else inside | dict(cls._tp_plan or {})


def heads(settings: HuggingFace) -> tuple[int, ...]:
    """Of queries, and of keys and values where those are fewer."""
    config = config_of(settings)
    found = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return tuple(n for n in found if n)
