"""``model=hf``: families of transformers are certified in every layout, or refused; folders come and go whole."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.__main__ import main

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="not installed: transformers; make test-real installs it"
)

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", "gemma2", "gemma3_text", "olmo2", "gpt_neox", "gpt2",
    "opt", "bert",
)  # fmt: skip
PP2 = "parallel.pipeline={stages: 2, micro_batch_num: 2}"
LAYOUTS = {
    f"2 stages, each over 2, {level}": (
        PP2,
        f"parallel.hsdp={{shard_size: 2, threshold: 0, optimizer_level: {level}}}",
    )
    for level in ("level1", "level2", "level3")
}


def typed(folder: Path, run: Path, *words: str) -> list[str]:
    return [
        "recipe=lm_single", "model=hf", f"model.path={folder}", "data=random_tokens", "data.vocab_size=64",
        "data.seq_len=16", "train.batch_size=16", "launch.nproc=4", f"run_dir={run}", "logger=plain", *words,
    ]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_certified(family: str, layout: str, tmp_path: Path) -> None:
    from tests.real.families import described

    folder = described(family, tmp_path / family)
    words = typed(folder, tmp_path / "run", "model.weights=false", "steps=[certify]", *LAYOUTS[layout])
    assert main(words) == 0
    assert json.loads((tmp_path / "run" / "certificate.json").read_text())["holds"]


@pytest.mark.parametrize("family", ["t5", "vit"])
def test_what_is_no_decoder_is_refused(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.real.families import described

    folder = described(family, tmp_path / family)
    assert main(typed(folder, tmp_path / "run", "model.weights=false", "steps=[train]")) == 2
    assert f"{folder}: transformers has no causal_lm of a {family}\n" in capsys.readouterr().err


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "mixtral"])
def test_a_folder_goes_in_and_comes_out_with_the_same_logits(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.real.families import weighed

    folder, run = weighed(family, tmp_path / family), tmp_path / "run"
    words = ("steps=[evaluate,save,export]", "steps.evaluate.batches=1", *LAYOUTS["2 stages, each over 2, level3"])
    assert main(typed(folder, run, *words)) == 0

    out, loaded = AutoModelForCausalLM.from_pretrained(run / "exports" / "hf", output_loading_info=True)
    assert not any(loaded.values())
    tokens = torch.arange(32).reshape(2, 16)
    assert torch.equal(out(tokens).logits, AutoModelForCausalLM.from_pretrained(folder)(tokens).logits)


def test_experts_that_a_folder_has_one_by_one_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.real.families import weighed

    assert main(typed(weighed("mixtral", tmp_path / "m"), tmp_path / "run", "steps=[train]")) == 2
    said = capsys.readouterr().err
    assert "it has no weights for the model's model.layers.0.mlp.gate.weight, " in said
    assert "the model has no place for its model.layers.0.block_sparse_moe.experts.0.w1.weight, " in said


def test_a_setting_that_the_config_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.real.families import described

    folder = described("llama", tmp_path / "m")
    words = ("model.weights=false", "model.config={num_hidden_layer: 3}", "steps=[train]")
    assert main(typed(folder, tmp_path / "run", *words)) == 2
    text = f"model.config.num_hidden_layer: LlamaConfig of {folder} has none, did you mean 'num_hidden_layers'?\n"
    assert text in capsys.readouterr().err


CUT = dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "olmo2", "gpt_neox"), "fp64")
CUT["gemma3_text"] = "fp32"  # its norms of heads work in fp32 always, and their gradients are summed over ranks
UNSAID = ("gpt2", "opt", "bert")


@pytest.mark.parametrize("family", CUT)
def test_operators_are_cut_as_the_config_says(family: str, tmp_path: Path) -> None:
    from tests.real.families import described

    folder, run = described(family, tmp_path / family), tmp_path / "run"
    words = ("model.weights=false", "operators=auto", "parallel.grid.tp=2", PP2, "steps=[certify]")
    assert main(typed(folder, run, *words, f"steps.certify.precision={CUT[family]}")) == 0
    assert json.loads((run / "certificate.json").read_text())["holds"]
    cut = json.loads((run / "plan.json").read_text())["operators"]["spreads"]
    assert any(".layers.3." in c["operator"]["module"] for c in cut)


@pytest.mark.parametrize("family", UNSAID)
def test_a_config_that_says_nothing_of_tp(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.real.families import described

    folder = described(family, tmp_path / family)
    words = ("model.weights=false", "operators=auto", "parallel.grid.tp=2", "steps=[train]")
    assert main(typed(folder, tmp_path / "run", *words)) == 2
    text = f"auto: the config of {folder} says nothing of tp: name modules by themselves\n"
    assert text in capsys.readouterr().err


def test_experts_that_look_at_numbers_are_not_followed_beside_what_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.real.families import described

    words = ("model.weights=false", "operators=auto", "parallel.grid.tp=2", "steps=[train]")
    assert main(typed(described("mixtral", tmp_path / "m"), tmp_path / "run", *words)) == 2
    assert "model.layers.0.mlp.experts looks at numbers that come from its inputs" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_read_into_parts_of_operators(dtype: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.real.families import weighed

    folder, run = weighed("llama", tmp_path / "m"), tmp_path / "run"
    kept = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    kept.save_pretrained(folder)
    words = ("operators=auto", "parallel.grid.tp=2", PP2, "steps=[evaluate,save,export]", "steps.evaluate.batches=1")
    assert main(typed(folder, run, *words)) == 0

    out = AutoModelForCausalLM.from_pretrained(run / "exports" / "hf")
    assert out.dtype == torch.float32
    weights = {name: w.float() for name, w in kept.state_dict().items()}
    assert all(torch.equal(w, weights[name]) for name, w in out.state_dict().items())
