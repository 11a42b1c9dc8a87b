"""The files beside the weights in an export of a transformers model: its config, its tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.checkpoint.foreign.cast import WIDTHS
from launcher.checkpoint.foreign.hf_names import written
from launcher.checkpoint.foreign.hf_read import CONFIG, model_type, named_dtype, read_hf
from launcher.job.schema.components import Chat, HuggingFace, Text
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Export
from launcher.plan.values.facts import COMPUTE, TensorSpec

GENERATION = ("generation_config.json",)
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""The file names that transformers reads; other files of a folder are not copied."""


def settled(step: Export, job: Job) -> Export:
    """``step`` with defaults filled in: a transformers model is exported as a folder like its own."""
    if not isinstance(job.model, HuggingFace):
        return step
    path = Path(job.model.path)
    new: dict[str, Any] = {"format": step.format or "hf"}
    if new["format"] == "hf" and step.names is None:
        new["names"] = _names(path, weights=job.model.weights)
    if new["format"] == "hf" and not step.beside:
        new["beside"] = (*_there(path, GENERATION), *_tokenizer(path, job))
    return step.model_copy(update=new)


def _there(folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(folder / name) for name in names if (folder / name).is_file())


def _tokenizer(path: Path, job: Job) -> tuple[str, ...]:
    """The tokenizer files that the run has read text with; for data of tokens those of the model."""
    if not isinstance(job.data, Text | Chat):
        return _there(path, TOKENIZER)
    if job.data.tokenizer_file is None:
        return ()  # bytes, or bpe of the text: transformers reads neither
    used = Path(job.data.tokenizer_file)
    if used.name != "tokenizer.json" or (used.is_file() and used.parent.samefile(path)):
        return _there(path, TOKENIZER)
    return _there(used.parent, TOKENIZER)


def _names(path: Path, *, weights: bool) -> Mapping[str, str] | None:
    """The names of tensors in the model's folder."""
    try:
        return written(model_type(path), read_hf(path).specs if weights else ())
    except (ValueError, OSError):  # reported for model.path
        return None


def told(step: Export, job: Job) -> tuple[str, ...]:
    """Names of the files that are generated rather than copied."""
    copied = any(Path(p).name == CONFIG for p in step.beside)
    own = isinstance(job.model, HuggingFace) and step.format == "hf"
    return (CONFIG,) if own and not copied else ()


def split_as(step: Export, job: Job) -> object:
    """The type of model whose folders store experts separately; ``None`` if the user names the tensors."""
    own = isinstance(job.model, HuggingFace) and step.format == "hf" and step.names is None
    return model_type(Path(job.model.path)) if own and isinstance(job.model, HuggingFace) else None


def opens_by_itself(step: Export, job: Job) -> HuggingFace | None:
    """The model that transformers should open from the export; ``None`` if it need not open it.

    ``step`` is the request's: with the user's own tensor names it is unknown who reads them.
    """
    separate = job.model.lora is not None and step.lora == "separate"
    full = settled(step, job)
    if not isinstance(job.model, HuggingFace) or separate or full.format != "hf" or step.names is not None:
        return None
    return job.model


def dtype_of(step: Export, job: Job) -> Callable[[str, str], str]:
    """Returns the function from a tensor's name in the folder and its dtype to the dtype to write.

    ``steps.export.dtype`` decides; otherwise a transformers model gets the dtype of the tensor of that name
    in its folder, or the one that the folder's config names.
    """
    specs: Mapping[str, TensorSpec] = {}
    usual = None if step.dtype is None else COMPUTE[step.dtype]
    if usual is None and isinstance(job.model, HuggingFace) and step.format == "hf":
        path = Path(job.model.path)
        with suppress(ValueError, OSError):  # a folder with only a config
            specs = read_hf(path).specs
        common = Counter(spec.dtype for spec in specs.values() if spec.dtype in WIDTHS).most_common(1)
        usual = named_dtype(path) or next((name for name, _ in common), None)

    def new(name: str, dtype: str) -> str:
        known = specs[name].dtype if name in specs else usual
        return known if dtype in WIDTHS and known in WIDTHS else dtype

    return new


def texts(step: Export, job: Job, kept: str) -> dict[str, str]:
    """Files to generate: the config of the model as trained; ``kept``: the dtype of the run's weights."""
    if not isinstance(job.model, HuggingFace) or not told(step, job):
        return {}
    from launcher.models.hugging_face import config_text

    return {CONFIG: config_text(job.model, dtype_of(step, job)("", kept))}
