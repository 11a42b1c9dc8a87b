"""``model.lora`` beside a folder of transformers: certified, and exported as transformers and PEFT read it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.__main__ import main

MISSING = [name for name in ("transformers", "peft") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; make test-real installs them"
)

TOKENS = torch.arange(32).reshape(2, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.real.families import weighed

    return weighed("llama", tmp_path_factory.mktemp("llama") / "m")


def typed(folder: Path, run: Path, *words: str) -> list[str]:
    return [
        "recipe=lm_single", "model=hf", f"model.path={folder}", "data=random_tokens", "data.vocab_size=64",
        "data.seq_len=16", "train.batch_size=16", "train.steps=3", "optim.lr=0.01", "launch.nproc=4",
        "parallel.pipeline={stages: 2, micro_batch_num: 2}",
        "parallel.hsdp={shard_size: 2, threshold: 0, optimizer_level: level3}",
        'model.lora={rank: 4, alpha: 8, modules: "model.layers.*.self_attn"}', f"run_dir={run}", "logger=plain", *words,
    ]  # fmt: skip


def trained(folder: Path, run: Path, how: str) -> Path:
    words = ("steps=[train,evaluate,save,export]", "steps.evaluate.batches=1", f"steps.export.lora={how}")
    assert main(typed(folder, run, *words)) == 0
    return run / "exports"


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model.eval()(TOKENS).logits
    return out


def test_adapters_beside_a_folder_are_certified(folder: Path, tmp_path: Path) -> None:
    assert main(typed(folder, tmp_path / "run", "steps=[certify]")) == 0


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_transformers_and_peft_read_what_was_trained(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # two runs of the same numbers: weights that adapters are added to, and adapters alone
    merged = AutoModelForCausalLM.from_pretrained(trained(folder, tmp_path / "merged", "merged") / "hf")
    base = AutoModelForCausalLM.from_pretrained(folder)
    before = logits(base)
    beside = PeftModel.from_pretrained(base, trained(folder, tmp_path / "beside", "separate") / "adapter")

    torch.testing.assert_close(logits(merged), logits(beside), rtol=0, atol=1e-6)
    assert (logits(merged) - before).abs().max() > 1e-3
