"""Opens an exported Hugging Face folder, and compares its model with the trained one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from launcher.checkpoint.foreign.mismatches import few
from launcher.data import text_tokenizer
from launcher.data.open import open_data
from launcher.errors import RunError
from launcher.job.schema.job import Job
from launcher.job.schema.models import HuggingFace
from launcher.models.hugging_face import opened, unlike_settings
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.values.precision import DTYPE

T = TypeVar("T")
SAMPLES = 2
EXACT = 1e-5
"""The allowed difference as a fraction of the largest logit: both run the same kernels on the same values."""


def check_settings(trained: HuggingFace, folder: Path) -> None:
    """Raises ``RunError`` if the files next to the weights cannot be read or describe another model."""
    _tried(lambda: read_beside(folder))
    if differences := _tried(lambda: unlike_settings(trained, str(folder))):
        raise RunError(f"export: the written config.json describes another model: {few(differences)}")


def read_beside(folder: Path) -> None:
    """Reads the files next to the weights; raises what their libraries raise."""
    if file := text_tokenizer.inside(folder):
        text_tokenizer.load(file)

    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(str(folder), local_files_only=True)


@torch.no_grad()
def check_logits(made: nn.Module, trained: HuggingFace, job: Job, folder: Path) -> None:
    """Raises ``RunError`` unless the folder's model has the logits of ``made``, the trained model."""
    theirs, unlike = _tried(lambda: opened(trained, str(folder), dtype_of(DTYPE[job.train.precision])))
    if unlike:
        text = "the written weights do not fit the model that transformers builds from the folder"
        raise RunError(f"export: {text}: {few(unlike)}")

    # the first held-out samples
    val = open_data(job.data, seed=job.seed, allow=job.security.allow).val
    indices = torch.arange(min(SAMPLES, len(val))).numpy()
    inputs = [x.to(theirs.dtype) if x.is_floating_point() else x for x in val.inputs(indices)]
    ours, read = (_logits(model, inputs) for model in (made, theirs))
    gap, largest = float((ours - read).abs().max()), float(ours.abs().max())
    if not gap <= EXACT * largest:
        text = f"export: transformers opens the written folder as another model: logits differ by {gap:.1e}"
        raise RunError(f"{text}, the largest is {largest:.1e}")


def _logits(model: nn.Module, inputs: list[Tensor]) -> Tensor:
    out: Tensor = model.eval()(*inputs)
    return out.double()


def _tried(read: Callable[[], T]) -> T:
    try:
        return read()
    except Exception as error:  # any error of transformers or tokenizers, as none is documented
        message = " ".join(str(error).split())
        raise RunError(f"export: transformers cannot read the written folder: {message[:300]}") from error
