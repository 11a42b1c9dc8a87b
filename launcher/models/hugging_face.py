"""Models of transformers, built from the ``config.json`` of a folder: one tensor in, logits out."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Task:
    """The names that transformers has for it: ``auto`` builds, ``mapping`` has a class by config."""

    auto: str
    mapping: str
    takes: str


TASKS = {
    "causal_lm": Task("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", "input_ids"),
    "image_classification": Task(
        "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "pixel_values"
    ),
}
UNSAID: dict[str, dict[str, str]] = {
    "bert": {
        **dict.fromkeys(
            (f"encoder.layer.*.attention.self.{n}" for n in ("query", "key", "value")), "colwise"
        ),
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    },
    "opt": {
        **dict.fromkeys((f"decoder.layers.*.self_attn.{n}_proj" for n in "qkv"), "colwise_gather_output"),
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    },
    "vit": {
        **dict.fromkeys((f"layers.*.attention.{n}_proj" for n in "qkv"), "colwise"),
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    },
}
"""Styles by ``model_type`` where its config says none, in the words of those that do.

The attention of OPT asks for all heads.
"""
EXPERTS = "experts_implementation"
KERNELS = ("attn_implementation", EXPERTS)
"""Which ones run, and nothing of the model: they are in no ``config.json``."""


def from_folder(settings: HuggingFace) -> nn.Module:
    """With new weights, under the names that the folder's have.

    Nothing is fetched, and code that the folder brings along is not run. Raises ``RequestError``.
    """
    import transformers

    config = config_of(settings)
    class_of(settings, config)
    if settings.task == "causal_lm":
        config.use_cache = False  # of generation
    of_task = TASKS[settings.task]
    auto = getattr(transformers, of_task.auto)
    model: nn.Module = auto.from_config(config, dtype=torch.get_default_dtype())
    model.__class__ = _logits_only(type(model), of_task.takes)  # type: ignore[arg-type]  # nn.Module has a __hash__
    return model


def class_of(settings: HuggingFace, config: PreTrainedConfig) -> type[Any]:
    """What transformers has for this task of such a config. Raises ``RequestError`` where it has nothing."""
    import transformers

    found: type[Any] | None = getattr(transformers, TASKS[settings.task].mapping).get(type(config), None)
    if found is None:
        text = f"{settings.path}: transformers has no {settings.task} of a {config.model_type}"
        raise RequestError((Problem("model.path", text),))
    return found


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
def _logits_only(cls: type[nn.Module], takes: str) -> type[nn.Module]:
    """The same class, whose forward takes the one tensor ``takes`` and returns the logits by themselves.

    ``documents``: which of those of a sample each token is of, where they are to be apart.
    """

    def forward(self: Any, samples: Tensor, documents: Tensor | None = None) -> Tensor:
        apart = {} if documents is None else arguments(self.config, documents)
        logits: Tensor = cls.forward(self, **{takes: samples}, return_dict=False, **apart)[0]
        return logits

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def tp_plan(settings: HuggingFace) -> dict[str, str]:
    """How its modules are cut over ``tp``: a style by glob; empty where neither transformers nor we say.

    A head that is tied to the embedding is whole as that is: nothing is said of most embeddings.
    """
    config = config_of(settings)
    cls = class_of(settings, config)
    styles = config.base_model_tp_plan or UNSAID.get(config.model_type)
    if not styles:
        return {}
    inside = {f"{cls.base_model_prefix}.{glob}": style for glob, style in styles.items()}
    tied = getattr(config, "tie_word_embeddings", False)  # no key of a vision model
    return inside if tied else inside | dict(cls._tp_plan or {})


def heads(settings: HuggingFace) -> tuple[int, ...]:
    """Of queries, and of keys and values where those are fewer."""
    config = config_of(settings)
    found = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return tuple(n for n in found if n)
