"""What an export of a transformers model has beside its weights: its settings, its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.checkpoint.foreign.hf_names import written
from launcher.checkpoint.foreign.hf_read import CONFIG, model_type, read_hf
from launcher.checkpoint.tensorfile.json_file import parsed, read_bytes
from launcher.job.schema.components import HuggingFace
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Export

OTHERS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""By the names that transformers reads; what else lies in a folder may be anything."""
RUNNING = ("attn_implementation", "experts_implementation", "use_cache")
"""Settings of a run and not of the model."""


def settled(step: Export, job: Job) -> Export:
    """With what is left open: a model of transformers goes into a folder, as its own is."""
    if not isinstance(job.model, HuggingFace):
        return step
    path = Path(job.model.path)
    new: dict[str, Any] = {"format": step.format or "hf"}
    if new["format"] == "hf" and step.names is None:
        new["names"] = _names(path, weights=job.model.weights)
    if new["format"] == "hf" and not step.beside:
        new["beside"] = tuple(str(path / name) for name in OTHERS if (path / name).is_file())
    return step.model_copy(update=new)


def _names(path: Path, *, weights: bool) -> Mapping[str, str] | None:
    """Into those of the folder."""
    try:
        return written(model_type(path), read_hf(path).specs if weights else ())
    except (ValueError, OSError):  # which is told of model.path
        return None


def told(step: Export, job: Job) -> tuple[str, ...]:
    """Names of the files that are written and not copied."""
    copied = any(Path(p).name == CONFIG for p in step.beside)
    own = isinstance(job.model, HuggingFace) and step.format == "hf"
    return (CONFIG,) if own and not copied else ()


def split_as(step: Export, job: Job) -> object:
    """The type of model whose folders have experts one by one; ``None`` where names are the user's own."""
    own = isinstance(job.model, HuggingFace) and step.format == "hf" and step.names is None
    return model_type(Path(job.model.path)) if own and isinstance(job.model, HuggingFace) else None


def texts(step: Export, job: Job, dtype: str) -> dict[str, str]:
    """Files to be written: the settings of the model as it was trained, whose weights are ``dtype``."""
    if not isinstance(job.model, HuggingFace) or not told(step, job):
        return {}
    path = Path(job.model.path) / CONFIG
    data = dict(parsed(path, read_bytes(path)))
    data |= {key: value for key, value in job.model.config.items() if key not in RUNNING}
    data.pop("torch_dtype", None)  # its name before transformers 5
    if "num_labels" in job.model.config:  # which says the same, of others
        data.pop("id2label", None), data.pop("label2id", None)
    return {CONFIG: json.dumps(data | {"dtype": dtype}, indent=2, sort_keys=True) + "\n"}
