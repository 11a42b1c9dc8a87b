"""Builds models with transformers, and the masks that keep packed documents separate.

transformers would infer documents from positions alone, but it reads values for that, which no stage of a
pipeline can do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from launcher.errors import Problem, RequestError
from launcher.job.schema.did_you_mean import did_you_mean, nearest
from launcher.job.schema.models import HuggingFace
from launcher.user_errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def attended(documents: Tensor) -> Tensor:
    """Returns the mask (batch, time, time) by which a token attends only to its own document, causally.

    ``documents`` (batch, time) has the number of each token's document.

    >>> import torch
    >>> attended(torch.tensor([[0, 0, 1]])).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]
    """
    return (documents.unsqueeze(2) == documents.unsqueeze(1)).tril()


def positions(seen: Tensor) -> Tensor:
    """Returns each token's position in its document (batch, time), from 0 on, by the mask of ``attended``."""
    return seen.sum(-1) - 1


def arguments(config: PreTrainedConfig, documents: Tensor) -> dict[str, Any]:
    """Returns the forward's arguments for ``documents`` (batch, time): one mask, or one per kind of layer."""
    seen = attended(documents)
    window = getattr(config, "sliding_window", None)
    near = seen if window is None else seen.triu(1 - window)
    masks = {
        "full_attention": _mask(config, seen),
        "sliding_attention": _mask(config, near),
    }
    by_layer = getattr(config, "layer_types", None) is not None
    return {
        "position_ids": positions(seen),
        "attention_mask": masks if by_layer else masks["sliding_attention"],
    }


def _mask(config: PreTrainedConfig, seen: Tensor) -> Tensor:
    """Returns a mask (batch, 1, time, time); eager attention adds it to its scores, whatever their dtype."""
    mask = seen.unsqueeze(1)
    if config._attn_implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)


@dataclass(frozen=True)
class ModelTask:
    """What transformers calls a task.

    ``auto`` is the class that builds models, ``mapping`` the table of model classes by config, and ``takes``
    the forward's argument.
    """

    auto: str
    mapping: str
    takes: str


TASKS = {
    "causal_lm": ModelTask("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", "input_ids"),
    "image_classification": ModelTask(
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
"""Tensor-parallel styles by ``model_type``, for configs of transformers without a ``base_model_tp_plan``.

Styles have the names of transformers' own plans. The attention of OPT needs all heads.
"""
EXPERTS = "experts_implementation"
KERNELS = ("attn_implementation", EXPERTS)
"""Settings that choose a kernel and do not change the model: no ``config.json`` contains them."""
CACHE = "use_cache"
LAYERS = "num_hidden_layers"
ROPE = "rope_parameters"
LABELS = ("id2label", "label2id")
INTO_ROPE = ("rope_theta", "partial_rotary_factor")
OLD_ROPE = ("rope_scaling", *INTO_ROPE)
"""The keys that ``rope_parameters`` replaced in transformers 5; some configs have them as well."""
ABOUT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", *KERNELS)
"""The keys of a ``config.json`` that do not describe the model."""


def from_folder(settings: HuggingFace) -> nn.Module:
    """Builds a model with new weights, which have the same names as the weights of the folder.

    Nothing is downloaded, and code in the folder is not run. Raises ``RequestError``.
    """
    import transformers

    config = config_of(settings)
    class_of(settings, config)
    _set_caches(config, False)
    of_task = TASKS[settings.task]
    auto = getattr(transformers, of_task.auto)
    model: nn.Module = auto.from_config(config, dtype=torch.get_default_dtype())
    model.__class__ = _logits_only(type(model), of_task.takes)  # type: ignore[arg-type]  # nn.Module has a __hash__
    return model


def class_of(settings: HuggingFace, config: PreTrainedConfig) -> type[Any]:
    """Returns the class that transformers has for this task and config.

    Raises ``RequestError`` if it has none.
    """
    import transformers

    cls: type[Any] | None = getattr(transformers, TASKS[settings.task].mapping).get(type(config), None)
    if cls is None:
        text = f"{settings.path}: transformers has no {settings.task} class for {config.model_type}"
        raise RequestError((Problem("model.path", text),))
    return cls


def config_of(settings: HuggingFace) -> PreTrainedConfig:
    """Returns the config that transformers reads from the folder's ``config.json`` and ``settings.config``.

    Raises ``RequestError``.
    """
    written, data = _written(settings)
    kernels = {key: settings.config[key] for key in KERNELS if key in settings.config}
    changed = _changed(settings, written, data, _changes(settings))
    _check_effects(settings, written, data, changed)
    with _refused_fields(settings):
        return _read(written, changed, **{EXPERTS: "eager"} | kernels, name_or_path=settings.path)


def stale(settings: HuggingFace) -> list[tuple[str, Any, Any]]:
    """Returns keys whose value in the folder's ``config.json`` does not fit the changes in ``settings``.

    ``save_pretrained`` also writes values that a class computes from other keys, such as ``head_dim``, and
    the class does not compute those again. Each key comes with its value in the file and the value that the
    class would compute.
    """
    if not (changes := _changes(settings)):
        return []
    written, data = _written(settings)
    changed = _changed(settings, written, data, changes)
    found = []
    for key, value in data.items():
        if changed.get(key) != value or key in changes:
            continue
        was, now = (_computed(written, d, key) for d in (data, changed))
        if was == value != now is not None:
            found.append((key, value, now))
    return found


def _computed(written: PreTrainedConfig, data: Mapping[str, Any], key: str) -> Any:
    """Returns the value that the class of ``written`` computes for ``key``; ``None`` if it fails."""
    try:
        return getattr(_read(written, {k: v for k, v in data.items() if k != key}), key, None)
    except Exception:  # the class of a config may raise anything
        return None


def _check_effects(
    settings: HuggingFace, written: PreTrainedConfig, data: Mapping[str, Any], changed: Mapping[str, Any]
) -> None:
    """Raises ``RequestError`` if a list with one entry per layer makes changes ineffective."""
    changes, layers = _changes(settings), getattr(written, LAYERS, None)
    lists = _by_layer(written, data, layers) if changes and isinstance(layers, int) else []
    count = written.attribute_map.get(LAYERS, LAYERS)
    others = {k: v for k, v in changes.items() if k not in (LAYERS, count, *lists)}

    def computed(key: str, some: Mapping[str, Any]) -> Any:
        return _computed(written, _changed(settings, written, data, some), key)

    for key in lists:
        if key in changes or not others or computed(key, {}) != data[key]:
            continue
        if computed(key, others) in (None, data[key]):
            continue
        each = (name for name, value in others.items() if computed(key, {name: value}) != data[key])
        name = next(each, next(iter(others)))
        text = f"{json.dumps(others[name])}: {key} of {settings.path} has one entry per layer"
        text += f", which overrides this; set {key} too"
        entries = ",".join(map(str, _computed(written, changed, key) or ()))
        cure = quote(f"model.config.{key}=[{entries}]") if entries else ""
        raise RequestError((Problem(f"model.config.{name}", text, cure),))


def _changes(settings: HuggingFace) -> dict[str, Any]:
    return {key: value for key, value in settings.config.items() if key not in KERNELS}


def _written(settings: HuggingFace) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Returns the config of the folder, and the file that it is read from. Raises ``RequestError``."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with _refused_fields(settings):
        raw, _ = PreTrainedConfig.get_config_dict(settings.path, **here)
        kind = raw.get("model_type")
        if "auto_map" in raw and kind not in CONFIG_MAPPING:
            text = (
                f"{settings.path}: transformers has no model of type {kind}, and the code that auto_map in "
            )
            text += "its config.json names is not run"
            raise RequestError((Problem("model.path", text),))
        written: PreTrainedConfig = AutoConfig.from_pretrained(settings.path, **here)
        data, _ = type(written).get_config_dict(settings.path, **here)
    return written, data


def _read(written: PreTrainedConfig, data: Mapping[str, Any], **kernels: Any) -> PreTrainedConfig:
    """Returns the config of the class of ``written`` that transformers reads from ``data``."""
    return type(written).from_dict(deepcopy(dict(data)), **kernels)  # from_dict changes its argument


def _changed(
    settings: HuggingFace,
    written: PreTrainedConfig,
    data: Mapping[str, Any],
    changes: Mapping[str, Any],
    above: str = "",
) -> dict[str, Any]:
    """Returns ``data``, which is a ``config.json`` and reads as ``written``, with ``changes``.

    Raises ``RequestError``. If ``data`` is only a part of the file, ``above`` is its key and a dot.
    """
    from transformers import PreTrainedConfig

    rope = [key for key in (ROPE, *OLD_ROPE) if key in changes and hasattr(written, ROPE)]
    for key in changes.keys() - {*rope} - data.keys():
        if not _settable(written, key):
            known = [*written.to_dict(), *(() if above else KERNELS)]
            text = f"{type(written).__name__} of {settings.path} has no such key"
            text += did_you_mean(nearest(key, known))
            raise RequestError((Problem(f"model.config.{above}{key}", text),))
    if rope:
        new = _rope_parameters(settings, getattr(written, ROPE) or {}, changes, above)
        changes = {k: v for k, v in changes.items() if k not in (ROPE, "rope_scaling")} | {ROPE: new}
        data = {key: value for key, value in data.items() if key not in OLD_ROPE}

    # a key has several names; the file must have it under one
    out, names = dict(data), written.attribute_map
    for key, value in changes.items():
        own = names.get(key, key)
        for name in (own, *(name for name, mapped in names.items() if mapped == own)):
            out.pop(name, None)
        part = getattr(written, own, None)
        if isinstance(part, PreTrainedConfig) and isinstance(value, Mapping):
            value = _changed(settings, part, data.get(own) or {}, value, f"{above}{own}.")
        out[own] = value
    if "num_labels" in changes:  # named labels would override the number
        out = {key: value for key, value in out.items() if key not in LABELS or key in changes}
    return _fit_lists(settings, written, data, out, changes, above)


def _settable(written: PreTrainedConfig, key: str) -> bool:
    """Returns true if the file of the config can set ``key``: it is neither a method nor computed."""
    mine = getattr(type(written), key, None)
    computed = isinstance(mine, property) and mine.fset is None
    return hasattr(written, key) and not callable(mine) and not computed


@contextmanager
def _refused_fields(settings: HuggingFace) -> Iterator[None]:
    """Reports a value that the class of the config refuses; its reason is not in the error's first line."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        # the class of huggingface_hub, which is no dependency of ours
        checked = any(kind.__name__ == "StrictDataclassError" for kind in type(error).__mro__)
        if not checked and not settings.config:
            raise
        field = re.search(r"for field '(\w+)'", str(error))
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines and checked else first_line(error)
        reason = re.sub(r"^\w+Error: ", "", reason) if checked else reason
        named = field[1] if field else next(iter(settings.config)) if len(settings.config) == 1 else ""
        if named in settings.config:
            text = f"{json.dumps(settings.config[named])}: {settings.path} cannot be built: {reason}"
            raise RequestError((Problem(f"model.config.{named}", text),)) from error
        key = "model.config" if settings.config and not field else "model.path"
        raise RequestError((Problem(key, f"{settings.path}: cannot be built: {reason}"),)) from error


def _rope_parameters(
    settings: HuggingFace, written: Mapping[str, Any], changes: Mapping[str, Any], above: str
) -> dict[str, Any]:
    """Returns the folder's ``rope_parameters`` (``written``) with those of ``changes``.

    ``OLD_ROPE`` are the names of its parts before transformers 5. Raises ``RequestError``.
    """
    changes = {key: changes[key] for key in (ROPE, *OLD_ROPE) if key in changes}
    if any(isinstance(value, Mapping) for value in written.values()):
        change = changes.get(ROPE)
        if len(changes) > 1 or not isinstance(change, Mapping) or not change.keys() <= written.keys():
            text = f"{settings.path} has {ROPE} for each kind of layer, {json.dumps(dict(written))}"
            key = f"model.config.{above}{next(iter(changes))}"
            raise RequestError((Problem(key, f"{text}: change them by kind in model.config.{above}{ROPE}"),))
        kinds = {
            kind: _changed_rope(f"{above}{ROPE}.{kind}", written[kind] or {}, c) for kind, c in change.items()
        }
        return dict(written) | kinds

    out = dict(written)
    for key, value in changes.items():
        out = _changed_rope(f"{above}{key}", out, {key: value} if key in INTO_ROPE else value)
    return out


def _changed_rope(key: str, written: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """Returns ``written`` with ``change``; ``null`` removes the scaling. Raises ``RequestError``.

    A change that names a ``rope_type`` is complete, except that ``rope_theta`` and ``partial_rotary_factor``
    stay.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if change is not None and not isinstance(change, Mapping):
        text = f"{change!r}: {ROPE} are null or a mapping, such as {json.dumps(dict(written))}"
        raise RequestError((Problem(f"model.config.{key}", text),))
    new = {"rope_type": "default"} if change is None else dict(change)
    if "type" in new:
        new = {"rope_type": new.pop("type")} | new
    base = {name: written[name] for name in INTO_ROPE if name in written}
    out: dict[str, Any] = (base if "rope_type" in new else dict(written)) | new

    known = ("default", *ROPE_INIT_FUNCTIONS)
    kind, theta = out.setdefault("rope_type", "default"), out.get("rope_theta", 1.0)
    if kind not in known:
        text = f"{ROPE} have rope_type {kind}{did_you_mean(nearest(str(kind), known))}"
        raise RequestError((Problem(f"model.config.{key}", f"{text} ({', '.join(known)})"),))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        text = f"{ROPE} have rope_theta {theta!r}, which is not a number above 0"
        raise RequestError((Problem(f"model.config.{key}", text),))
    return out


def _fit_lists(
    settings: HuggingFace,
    written: PreTrainedConfig,
    data: Mapping[str, Any],
    changed: dict[str, Any],
    changes: Mapping[str, Any],
    above: str,
) -> dict[str, Any]:
    """Returns ``changed`` with its lists of one entry per layer cut to the number of layers.

    A model with fewer layers reads the first entries. transformers cannot open a folder that has more entries
    than layers, so a list in ``changes`` must have one entry per layer. Raises ``RequestError``.
    """
    layers = written.attribute_map.get(LAYERS, LAYERS)
    was = getattr(written, LAYERS, None)
    now = changed.get(layers, was)
    if not isinstance(was, int) or not isinstance(now, int):
        return changed
    out = dict(changed)
    for key in _by_layer(written, data, was):
        value = changed.get(key)
        if not isinstance(value, list):
            continue
        if key in changes and len(value) != now:
            text = f"it lists {len(value)} values, but the model has {now} layers; set one for each layer"
            raise RequestError((Problem(f"model.config.{above}{key}", text),))
        if key in changes:
            continue
        if now > was:
            text = (
                f"{now}: {key} of {settings.path} has {was} entries, one for each layer; "
                f"set model.config.{above}{key} with {now} entries too"
            )
            raise RequestError((Problem(f"model.config.{above}{LAYERS}", text),))
        out[key] = value[:now]
    return out


def _by_layer(written: PreTrainedConfig, data: Mapping[str, Any], layers: int) -> list[str]:
    """Returns the keys of ``data`` that list an entry for each of the ``layers`` layers.

    A list of numbers counts only if the class of the config would make it with one entry per layer: other
    lists have the indices of some layers, or have that length by chance.
    """
    found = [key for key, value in data.items() if isinstance(value, list) and len(value) == layers]
    found = [key for key in found if key != "architectures" and not key.endswith(("_token_id", "_token_ids"))]
    numbers = [key for key in found if not all(isinstance(value, str) for value in data[key])]
    if not numbers:
        return found
    own = written.attribute_map.get(LAYERS, LAYERS)
    without = {key: value for key, value in data.items() if key not in (*found, LAYERS)}
    try:
        more, fewer = (_read(written, without | {own: n}) for n in (layers + 1, layers))
    except Exception:  # the class of a config may raise anything; then it makes no lists
        return [key for key in found if key not in numbers]
    lengths = {key: [_length(getattr(c, key, None)) for c in (more, fewer)] for key in numbers}
    return [key for key in found if key not in numbers or lengths[key] == [layers + 1, layers]]


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None


def exported_config_json(settings: HuggingFace, dtype: str) -> str:
    """Returns ``config.json`` as transformers saves it with the model of ``settings``, in ``dtype``.

    It is the config of the built model: its class has converted old keys and applied the changes of
    ``settings``.
    """
    text: str = _live(settings, dtype).to_json_string(use_diff=True)
    return text


def _live(settings: HuggingFace, dtype: str) -> PreTrainedConfig:
    with torch.device("meta"):
        model: Any = from_folder(settings)
    config: PreTrainedConfig = model.config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    for part, as_read in zip(_decoders(config), _decoders(config_of(settings)), strict=True):
        if hasattr(as_read, CACHE):
            setattr(part, CACHE, getattr(as_read, CACHE))
    return config


def _decoders(config: PreTrainedConfig) -> tuple[PreTrainedConfig, ...]:
    """Returns the config of the model, and of its decoder if that has one of its own."""
    decoder = config.get_text_config(decoder=True)
    return (config,) if decoder is config else (config, decoder)


def _set_caches(config: PreTrainedConfig, value: bool) -> None:
    """Sets whether a forward keeps keys and values, which only generation uses."""
    for part in _decoders(config):
        if hasattr(part, CACHE):
            setattr(part, CACHE, value)


def unlike_settings(settings: HuggingFace, folder: str) -> list[str]:
    """Returns the keys in which the config in ``folder`` differs from the model of ``settings``, sorted."""
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    ours, read = (_compared(c) for c in (_live(settings, str(theirs.dtype)), theirs))
    return sorted(key for key in ours.keys() | read.keys() if ours.get(key) != read.get(key))


def _compared(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the keys of a config that describe the model, as JSON values."""
    data: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in data.items() if key not in ABOUT}


def opened(settings: HuggingFace, folder: str, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """Returns the model that transformers loads from ``folder``, and the names of weights that do not fit it.

    Its forward returns the logits.
    """
    import transformers

    of_task = TASKS[settings.task]
    kernels = {EXPERTS: "eager"} | {k: v for k, v in settings.config.items() if k in KERNELS}
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        auto = getattr(transformers, of_task.auto)
        model, loading_info = auto.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, **here, **kernels
        )
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    _set_caches(model.config, False)
    cls: type[nn.Module] = type(model)
    model.__class__ = _logits_only(cls, of_task.takes)  # type: ignore[arg-type]  # nn.Module has a __hash__
    unlike = [
        str(name)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        for name in loading_info[kind]
    ]
    return model, sorted(unlike)


@cache
def _logits_only(cls: type[nn.Module], takes: str) -> type[nn.Module]:
    """Returns a subclass whose forward takes the one tensor ``takes`` and returns only the logits.

    ``documents`` (batch, time) has the number of each token's document, if documents are kept separate.
    """

    def forward(self: Any, samples: Tensor, documents: Tensor | None = None) -> Tensor:
        apart = {} if documents is None else arguments(self.config, documents)
        logits: Tensor = cls.forward(self, **{takes: samples}, return_dict=False, **apart)[0]
        return logits

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def tp_plan(settings: HuggingFace) -> dict[str, str]:
    """Returns a tensor-parallel style by glob of module names, or nothing if no plan exists for the model.

    A head that is tied to the embedding is not cut, because most plans do not split the embedding.
    """
    config = config_of(settings)
    cls = class_of(settings, config)
    styles = config.base_model_tp_plan or UNSAID.get(config.model_type)
    if not styles:
        return {}
    inside = {f"{cls.base_model_prefix}.{glob}": style for glob, style in styles.items()}
    tied = getattr(config, "tie_word_embeddings", False)  # vision models lack this key
    return inside if tied else inside | dict(cls._tp_plan or {})


def heads(settings: HuggingFace) -> tuple[int, ...]:
    """Returns the number of query heads, and the number of key and value heads if the config has it."""
    config = config_of(settings).get_text_config(decoder=True)
    counts = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return tuple(n for n in counts if n)
