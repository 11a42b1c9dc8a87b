"""A Hugging Face folder of a Llama with random weights and a tokenizer trained on one line, small enough for tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from launcher.checkpoint.foreign.names import TO_LLAMA, renamed
from launcher.data import train_byte_pairs
from launcher.job.schema.models import LanguageModel
from launcher.models.build import build_model

SIZES = {"dim": 36, "layers": 2, "heads": 9, "kv_heads": 3, "ffn_dim": 64}
"""The sizes have as many heads as SmolLM2-135M, so that two ranks cannot share them evenly."""
VOCABULARY = 270


def overrides(folder: Path) -> tuple[str, ...]:
    """Return overrides that make the recipe ``smollm2_pp2_tp2`` use this folder in place of SmolLM2."""
    sizes = (f"model.{key}={n}" for key, n in SIZES.items())
    return (f"steps.import.src={folder}", f"data.vocab_size={VOCABULARY}", *sizes)


def write(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Write the folder, and return the weights under our names.

    The tied embedding is written once, as transformers writes it.
    """
    torch.manual_seed(0)
    model = build_model(LanguageModel(name="lm", vocab_size=VOCABULARY, **SIZES))
    ours = {name: (p.detach() * 5).to(dtype) for name, p in model.named_parameters()}
    new = renamed(ours, TO_LLAMA).names
    folder.mkdir(parents=True)
    save_file({new[name]: t for name, t in ours.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    train_byte_pairs.train("to be or not to be\n" * 50, VOCABULARY).save(str(folder / "tokenizer.json"))
    return ours
