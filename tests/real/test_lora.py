"""``model.lora`` with a folder of transformers: certified, and exported as transformers and PEFT read it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launcher.__main__ import main
from launcher.checkpoint.layout.strategy import single
from launcher.checkpoint.read import open_checkpoint, read_rank
from launcher.runtime.training.checkpoint_tensors import unpacked

MISSING = [name for name in ("transformers", "peft") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; make test-real installs them"
)

TOKENS = torch.arange(32).reshape(2, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.real.families import weighed

    return weighed("llama", tmp_path_factory.mktemp("llama") / "m")


@pytest.fixture(scope="module")
def half(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder saved in bfloat16."""
    from transformers import AutoModelForCausalLM

    at = tmp_path_factory.mktemp("half") / "m"
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(at)
    return at


@pytest.fixture(scope="module")
def widened(half: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The numbers of ``half`` saved in float32."""
    from transformers import AutoModelForCausalLM

    at = tmp_path_factory.mktemp("widened") / "m"
    AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32).save_pretrained(at)
    return at


def typed(folder: Path, run: Path, *words: str) -> list[str]:
    return [
        "recipe=lm_single", "model=hf", f"model.path={folder}", "data=random_tokens", "data.vocab_size=64",
        "data.seq_len=16", "train.batch_size=16", "train.steps=3", "optim.lr=0.01", "launch.nproc=4",
        "parallel.pipeline={stages: 2, micro_batch_num: 2}",
        "parallel.hsdp={shard_size: 2, threshold: 0, optimizer_level: level3}",
        'model.lora={rank: 4, alpha: 8, modules: "model.layers.*.self_attn"}', f"run_dir={run}", "logger=plain", *words,
    ]  # fmt: skip


def trained(folder: Path, run: Path, how: str, *words: str) -> Path:
    steps = ("steps=[train,evaluate,save,export]", "steps.evaluate.batches=1", f"steps.export.lora={how}")
    assert main(typed(folder, run, *steps, *words)) == 0
    return run / "exports"


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model.eval()(TOKENS).logits
    return out


def test_adapters_beside_a_folder_are_certified(folder: Path, tmp_path: Path) -> None:
    assert main(typed(folder, tmp_path / "run", "steps=[certify]")) == 0


def test_adapters_beside_weights_that_the_folder_cuts_are_certified(folder: Path, tmp_path: Path) -> None:
    cut = ("operators=auto", "parallel.grid.tp=2", "parallel.hsdp=null", 'model.lora.modules="*_proj"')
    assert main(typed(folder, tmp_path / "run", "steps=[certify]", *cut)) == 0


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT reads it
def test_transformers_and_peft_read_what_was_trained(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # two runs with the same numbers: one exports merged weights, the other adapters alone
    merged = AutoModelForCausalLM.from_pretrained(trained(folder, tmp_path / "merged", "merged") / "hf")
    base = AutoModelForCausalLM.from_pretrained(folder)
    before = logits(base)
    beside = PeftModel.from_pretrained(base, trained(folder, tmp_path / "beside", "separate") / "adapter")

    torch.testing.assert_close(logits(merged), logits(beside), rtol=0, atol=1e-6)
    assert (logits(merged) - before).abs().max() > 1e-3


def weights_of_checkpoint(run: Path, step: int = 3) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(run / "checkpoints" / f"step-{step:06d}")
    found = read_rank(checkpoint, single(checkpoint.strategy), 0, kinds=("param", "buffer"))
    return {name: unpacked(b) for name, b in found.items()}


def losses(run: Path) -> list[float]:
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_base_in_half_precision_is_kept_so_and_learns_the_same(
    half: Path, widened: Path, folder: Path, tmp_path: Path, low: str
) -> None:
    words = ("steps=[train,save]", f"train.precision={low}", *(("train.loss_scale=8",) if low == "fp16" else ()))
    for name, base in (("half", half), ("widened", widened)):
        assert main(typed(base, tmp_path / name, *words)) == 0
    ours, wide = weights_of_checkpoint(tmp_path / "half"), weights_of_checkpoint(tmp_path / "widened")
    kept = torch.bfloat16 if low == "bf16" else torch.float32  # fp16 cannot represent all bfloat16 values

    assert {t.dtype for n, t in ours.items() if "lora" not in n} == {kept}
    assert {t.dtype for n, t in ours.items() if "lora" in n} == {torch.float32}
    assert losses(tmp_path / "half") == losses(tmp_path / "widened")
    assert all(torch.equal(t, ours[n].to(t.dtype)) for n, t in wide.items())
    base = load_file(half / "model.safetensors")
    assert all(torch.equal(base[n], t.bfloat16()) for n, t in ours.items() if n in base)


def test_a_base_in_half_precision_is_certified_and_goes_on_in_another_layout(half: Path, tmp_path: Path) -> None:
    run, words = tmp_path / "run", ("train.precision=bf16",)
    assert main(typed(half, run, "steps=[certify]", *words, "steps.certify.precision=bf16")) == 0
    assert main(typed(half, run, "steps=[train,save]", *words)) == 0
    other = ("parallel.pipeline={stages: 1}", "parallel.hsdp={shard_size: 4, threshold: 0}")
    assert main(typed(half, run, "steps=[train,save]", *words, "train.steps=5", *other)) == 0
    before, after = weights_of_checkpoint(run), weights_of_checkpoint(run, 5)
    assert all(torch.equal(after[n], t) == ("lora" not in n) for n, t in before.items())
    assert {t.dtype for n, t in after.items() if "lora" not in n} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT reads it
def test_a_base_in_half_precision_is_exported_as_its_folder_is_or_in_whole_sums(half: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, words = tmp_path / "merged", ("train.precision=bf16",)
    rounded = load_file(trained(half, run, "merged", *words) / "hf/model.safetensors")
    exact = ("steps=[export]", "steps.export.dtype=fp32", f"steps.export.path={tmp_path}/wide")
    assert main(typed(half, run, *words, *exact)) == 0
    sums = load_file(tmp_path / "wide/model.safetensors")
    assert {t.dtype for t in rounded.values()} == {torch.bfloat16}
    assert {t.dtype for t in sums.values()} == {torch.float32}
    assert all(torch.equal(rounded[name], t.bfloat16()) for name, t in sums.items())

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    base = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    beside = PeftModel.from_pretrained(base, trained(half, tmp_path / "beside", "separate", *words) / "adapter")
    torch.testing.assert_close(logits(merged), logits(beside), rtol=0, atol=1e-6)
