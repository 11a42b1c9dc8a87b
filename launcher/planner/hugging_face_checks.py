"""Checks the folder of a Hugging Face model, and whether its weights fit the plan."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from launcher.checkpoint.cast import castable
from launcher.checkpoint.foreign.hugging_face import (
    CONFIG,
    joined,
    model_type,
    names_in_folder,
    read_hf,
    unknown,
)
from launcher.checkpoint.foreign.import_checkpoint import unequal_ties
from launcher.checkpoint.foreign.mismatches import few
from launcher.checkpoint.full_tensors import Blobs, RenamedTensors
from launcher.checkpoint.layout.derive_strategy import strategy_to_load
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.tensorfile.safetensors import described
from launcher.errors import Problem, error_text
from launcher.job.schema.data import DocumentSetting, apart
from launcher.job.schema.job import Job
from launcher.job.schema.models import MOST_LAYERS, HuggingFace
from launcher.optional import install_command
from launcher.plan.plan import Plan
from launcher.plan.values.model_graph import ModelStructure, Param
from launcher.plan.values.note import Note
from launcher.plan.values.precision import COMPUTE, DTYPE
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import bytes_text, many
from launcher.untrusted.files import read_json
from launcher.untrusted.hub_name_hint import download_hint

KEY, WEIGHTS = "model.path", "model.weights"
NEW = "model.weights=false"
TIED = "tie_word_embeddings"
UNTIED = f"model.config.{TIED}=false"
KERNELS = ("attn_implementation", "experts_implementation")
"""Keys of ``model.config`` that choose a kernel and leave the weights as they are."""
MISSING = object()
DTYPES = {"dtype", "torch_dtype"}
"""Keys of a ``config.json`` that would have no effect in ``model.config``."""
QUANTIZED = "quantization_config"
GENERATION = "generation_config.json"
APART = (
    "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "opt", "phi3",
    "qwen2", "qwen3",
)  # fmt: skip
"""Model families that treat each document as if it were alone; ``tests/real`` proves it for each."""
MOST = 10_000
"""The most keys of a config, and the most values of a list; published models have some hundreds."""
MOST_LABELS = 50_000
"""The most labels; ImageNet-21k has 21 843."""
LABELS = ("id2label", "label2id", "vocab")
SHOWN = 3
"""The most values of a config that are reported."""


@dataclass(frozen=True)
class NumberBounds:
    """The values that numbers of these names may have. A number in a list has the name of the list."""

    names: re.Pattern[str]
    least: int
    most: int
    text: str


ROLES = (
    NumberBounds(
        re.compile(r"num_hidden_layers|(num|n)_layers?|(en|de)coder_layers|((en|de)coder_)?depths?"),
        1, MOST_LAYERS, "a model has 1 to {most} layers",
    ),
    NumberBounds(
        re.compile(
            r"(\w+_)?(num|n)_\w*(blocks?|layers?|experts|stages|codebooks|inputs|branches|levels|groups)"
        ),
        0, MOST, "a model has at most {most} of these",
    ),
    NumberBounds(re.compile(r"\w*(layers?|depths?)"), -MOST, MOST, "a model has at most {most} of these"),
    NumberBounds(re.compile(r"(num|n)_(labels|classes)"), 0, MOST_LABELS, "at most {most} labels are built"),
    NumberBounds(
        re.compile(
            r"\w*(size|sizes|dims?|positions?|position_embeddings|embd|inner|width|height|channels|features"
            r"|heads?|length|len|ctx|vocab|kernel|rank)|(\w+_)?(num|n)_(?!param)\w+"
        ),
        -1, 1 << 26, "no model has a size above {most}",
    ),
)  # fmt: skip
"""The first role whose names match counts. Published models have up to 10 485 760 positions."""
LARGEST = NumberBounds(re.compile(""), -(1 << 40), 1 << 40, "it is not a model size")
"""The role of all other numbers, such as the base of rotary embeddings."""
IMPLEMENTATION = "_implementation"
"""Keys with this in their name choose a kernel, which transformers downloads if it is a name on the hub."""
ROUTED = "output_router_logits"
TEXT = "text_config"
UNSAID = ("LABEL_0", "LABEL_1")
"""The labels of a config that lists none."""


def check(job: Job, tokens: int | None, classes: int | None) -> list[Problem]:
    """Returns problems that the folder alone shows; transformers is not imported.

    ``tokens``, ``classes``: the numbers of token ids and classes that the data may have, if known.
    """
    if not isinstance(job.model, HuggingFace):
        return []
    exports = any(step.kind == "export" for step in job.steps.values())
    generation = [*_generation(Path(job.model.path))] if exports else []
    return [*_check(job.model, tokens, classes, apart(job.data)), *generation]


def _generation(folder: Path) -> Iterator[Problem]:
    """Yields a problem if transformers cannot read the generation config, which an export would contain."""
    path = folder / GENERATION
    if not path.is_file():
        return
    try:
        read_json(path)
    except (ValueError, OSError) as error:
        text = f"{path}: an export would contain a copy of this file, which transformers cannot read"
        yield Problem(KEY, f"{text}: {error_text(error).removeprefix(f'{path}: ')}")


def _check(
    model: HuggingFace, tokens: int | None, classes: int | None, documents: DocumentSetting | None
) -> Iterator[Problem]:
    if find_spec("transformers") is None:
        text = f"hf: transformers is not installed: {install_command('hf')}"
        yield Problem("model", text)
    path = Path(model.path)
    if not path.is_dir():
        yield Problem(KEY, f"{path}: no such folder{download_hint(path, 'model')}")
        return
    if not (path / CONFIG).exists():
        text = f"it has no {CONFIG}, so the kind of model is unknown"
        yield Problem(KEY, f"{path}: {text}; name a folder that save_pretrained of transformers has written")
        return
    yield from _config(path / CONFIG, model, tokens, classes, documents)
    if model.weights:
        try:
            read_hf(path)
        except (ValueError, OSError) as error:
            yield Problem(KEY, error_text(error), NEW)


def _config(
    path: Path, model: HuggingFace, tokens: int | None, classes: int | None, documents: DocumentSetting | None
) -> Iterator[Problem]:
    try:
        data = read_json(path, unique=True)
    except (ValueError, OSError) as error:
        yield Problem(KEY, f"{path}: {error_text(error).removeprefix(f'{path}: ')}")
        return
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        text = "it has no model_type, so the kind of model is unknown"
        yield Problem(KEY, f"{path}: {text}; name a folder that save_pretrained of transformers has written")
        return
    for key in DTYPES & model.config.keys():
        text = f"{model.config[key]}: it has no effect; train.precision sets the dtype of the computation"
        yield Problem(f"model.config.{key}", f"{text}, steps.export.dtype that of an export")
    if wrong := [*islice(_beyond(data | model.config), SHOWN)]:
        yield from (Problem(KEY, f"{path}: {text}") for text in wrong)
        return
    if documents is not None:
        yield from _mixed(data | model.config, documents)
    decoder = _decoder(data, model.config)
    if decoder.get(ROUTED):
        text = "true: the forward would also return router logits, but the launcher trains no router loss"
        key = ROUTED if (data | model.config).get(ROUTED) else f"{TEXT}.{ROUTED}"
        yield Problem(f"model.config.{key}", text, f"model.config.{key}=false")
    if (data | model.config).get(QUANTIZED):
        text = "this config is for quantized weights, but the launcher trains and exports unquantized ones"
        yield Problem(f"model.config.{QUANTIZED}", text, f"model.config.{QUANTIZED}=null")
    rows = decoder.get("vocab_size")
    if tokens is not None and isinstance(rows, int) and rows < tokens:
        text = f"{path}: vocab_size {rows} is too small for the {tokens} tokens of the data"
        yield Problem(KEY, f"{text}; use the tokenizer of this model")
    labels = (data | model.config).get("num_labels") or len(data.get("id2label") or UNSAID)
    if model.task == "image_classification" and classes is not None and labels < classes:
        text = f"{path}: {labels} labels are too few for the {classes} classes of the data"
        yield Problem(KEY, text, f"model.config.num_labels={classes}")


def _decoder(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that describe the decoder; a multimodal model has them in ``text_config``."""
    parts = [part.get(TEXT) for part in (data, changes)]
    inner = {key: value for part in parts if isinstance(part, Mapping) for key, value in part.items()}
    return {**data, **inner, **changes}


def _beyond(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields what no model has but transformers would build, and kernels that it would download."""
    keys = 0
    parts: list[tuple[str, str, Any]] = [("", "", config)]
    while parts:
        key, name, value = parts.pop()
        if name in LABELS and isinstance(value, Mapping | list | tuple):
            if len(value) > MOST_LABELS:
                yield f"{key} has {len(value)} entries; at most {MOST_LABELS} are read"
        elif isinstance(value, Mapping):
            keys += len(value)
            if keys > MOST:
                yield f"it has {keys} keys; at most {MOST} are read"
                return
            inner = [(f"{key}.{n}" if key else n, n, v) for n, v in value.items()]
            parts += reversed(inner)
        elif isinstance(value, list | tuple):
            yield from _beyond_list(key, name, value)
            parts += reversed([(key, name, v) for v in value[:MOST]])
        elif isinstance(value, str):
            if IMPLEMENTATION in f"{key}." and "/" in value:
                yield f"{key} is {value}: the launcher runs no downloaded kernels"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            role = _bounds(name)
            if role is LARGEST and isinstance(value, float):
                continue  # such as an infinite limit
            if not role.least <= value <= role.most:
                yield f"{key} is {value}; {role.text.format(most=role.most)}"


def _beyond_list(key: str, name: str, values: Sequence[Any]) -> Iterator[str]:
    if len(values) > MOST:
        yield f"{key} lists {len(values)} values; at most {MOST} are read"
    elif _bounds(name) is ROLES[0]:  # the layers of each stage
        counts = [value for value in values if isinstance(value, int) and value <= MOST_LAYERS]
        if (total := sum(counts)) > MOST_LAYERS:
            yield f"{key} has {total} layers in all; {ROLES[0].text.format(most=MOST_LAYERS)}"


def _bounds(name: str) -> NumberBounds:
    return next((role for role in ROLES if role.names.fullmatch(name)), LARGEST)


def _mixed(config: Mapping[str, Any], documents: DocumentSetting) -> Iterator[Problem]:
    """Yields why the documents of a sample would not be kept separate."""
    kind, attention = config["model_type"], config.get("attn_implementation") or "sdpa"
    if kind not in APART or config.get("use_bidirectional_attention"):
        text = f"{documents.value}: the launcher cannot separate documents in a {kind}"
        yield Problem(documents.key, f"{text}; it can in {', '.join(APART)}", documents.cure)
    elif attention not in ("sdpa", "eager"):
        text = f"{attention}: {documents.key}={documents.value} needs masks, which only sdpa and eager take"
        key = "model.config.attn_implementation"
        yield Problem(key, text, f"{key}=sdpa")


def misfits(job: Job, plan: Plan) -> list[Problem]:
    """Returns problems of weights that do not fit the model.

    Compares file headers, and the values of tied tensors.
    """
    if not isinstance(job.model, HuggingFace) or not job.model.weights:
        return []
    path = Path(job.model.path)
    strategy = strategy_to_load(plan, read_hf(path).specs)
    source = joined(Blobs(read_hf(path)), model_type(path), {n: e.spec for n, e in strategy.entries.items()})
    if differences := [*_differences(source.specs, strategy)]:
        return [*_misfit(job.model, differences)]

    named = RenamedTensors(source, names_in_folder(source.specs, strategy.named))
    text = "are one tensor of the model, but the folder has different values for them"
    ties = unequal_ties(named, strategy)
    if TIED in job.model.config:
        text = f"{text}; {UNTIED} keeps both"
        return [Problem(f"model.config.{TIED}", f"true: {path}: {a} and {b} {text}") for a, b in ties]
    return [Problem(KEY, f"{path}: {a} and {b} {text}", UNTIED) for a, b in ties]


def _misfit(model: HuggingFace, differences: Sequence[str]) -> Iterator[Problem]:
    """Yields the differences as problems of the keys of ``model.config`` that change the model, if any do."""
    data = read_json(Path(model.path) / CONFIG)
    changed = [k for k, value in model.config.items() if k not in KERNELS and data.get(k, MISSING) != value]
    if not changed:
        yield from (Problem(KEY, f"{model.path}: {text}") for text in differences)
        return

    # two ways out: the values of the folder, which its weights fit, or new weights for the requested values
    was = {k: data[k] if k in data else _opposite(model.config[k]) for k in changed}
    olds = " ".join(f"model.config.{k}={_json(v)}" for k, v in was.items() if v is not None)
    reads = f"; they fit {olds}" if None not in was.values() else ""
    values = ", ".join(f"{k}={_json(model.config[k])}" for k in changed)
    if changed == [TIED] and not model.config[TIED]:
        text = f"false: the weights in {model.path} do not fit: {differences[0]}"
        text = (
            f"{text}{reads}; to train a separate head, save the folder with a copy of the embedding as head"
        )
        yield Problem(f"model.config.{TIED}", text)
    elif len(changed) == 1:
        value = values.partition("=")[2]
        text = f"{value}: the weights in {model.path} do not fit: {differences[0]}{reads}"
        yield Problem(f"model.config.{changed[0]}", text, NEW)
    else:
        text = f"{values}: the weights in {model.path} do not fit: {differences[0]}{reads}"
        yield Problem("model.config", text, NEW)


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _opposite(value: Any) -> Any:
    """Returns the other value of a switch that the folder does not mention; ``None`` if it is no switch."""
    return not value if isinstance(value, bool) else None


def _differences(specs: Mapping[str, TensorSpec], target: Strategy) -> Iterator[str]:
    names = names_in_folder(specs, target.named)
    lacking = [n for n, e in target.entries.items() if not {n, *e.aliases} & names.keys()]
    if lacking:
        yield f"the folder has no weights for the model's {few(lacking)}"
    if strange := unknown(specs, names):
        yield f"the model has no tensor for the folder's {few(strange)}"
    unlike = []
    for name, theirs in names.items():
        actual, expected = specs[theirs], target.entries[target.named[name]].spec
        if actual.shape != expected.shape or (
            actual.dtype != expected.dtype and not castable(actual.dtype, expected.dtype)
        ):
            unlike.append(f"{theirs} is {described(actual)}, but in the model {described(expected)}")
    if unlike:
        yield few(unlike, "; ")


def with_stored(job: Job, skeleton: ModelStructure) -> ModelStructure:
    """Records for frozen parameters the dtype in which the folder stores their weights."""
    if not isinstance(job.model, HuggingFace) or not job.model.weights:
        return skeleton
    if COMPUTE[job.train.precision] == DTYPE[job.train.precision] or all(
        p.trainable for p in skeleton.params
    ):
        return skeleton
    path = Path(job.model.path)
    source = joined(Blobs(read_hf(path)), model_type(path), {p.name: p.spec for p in skeleton.params})
    theirs = names_in_folder(source.specs, [p.name for p in skeleton.params])
    first = {p.same_as: source.specs[theirs[p.name]].dtype for p in skeleton.params if p.name in theirs}

    def with_stored_dtype(p: Param) -> Param:
        return p if p.trainable or p.buffer else replace(p, stored=first.get(p.same_as, ""))

    return replace(skeleton, params=tuple(map(with_stored_dtype, skeleton.params)))


def note(job: Job) -> list[Note]:
    """Notes where the weights come from."""
    if not isinstance(job.model, HuggingFace) or not job.model.weights:
        return []
    specs = read_hf(Path(job.model.path)).specs
    size = bytes_text(sum(s.nbytes for s in specs.values()))
    text = f"true: {many(len(specs), 'tensor')} ({size}) are read; each rank reads its part"
    return [Note(WEIGHTS, text)]
