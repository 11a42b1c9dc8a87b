"""``model=hf``: transformers' families are certified in every layout, or refused; folders are read and written."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.checkpoint.foreign.hugging_face import read_hf
from tests.real import family_table

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="not installed: transformers; make test-real installs it"
)

FAMILIES = [f for f in family_table.FAMILIES.values() if f not in ("t5", "vit")]
PP2 = "parallel.pipeline={stages: 2, micro_batch_num: 2}"
SPREAD = (PP2, "parallel.hsdp={shard_size: 2, threshold: 0, optimizer_level: level3}")


def typed(folder: Path, run: Path, *words: str) -> list[str]:
    return [
        "recipe=lm_single", "model=hf", f"model.path={folder}", "data=random_tokens", "data.vocab_size=64",
        "data.seq_len=16", "train.batch_size=16", "launch.nproc=4", f"run_dir={run}", "logger=plain", *words,
    ]  # fmt: skip


def test_the_table_has_a_row_a_family() -> None:
    assert [*family_table.written()] == [*family_table.FAMILIES]


@pytest.mark.parametrize("column", family_table.COLUMNS)
@pytest.mark.parametrize("family", family_table.FAMILIES)
def test_the_table_says_what_is_seen(family: str, column: str, tmp_path: Path) -> None:
    assert family_table.seen(family, column, tmp_path) == family_table.written()[family][column]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_certified_on_two_stages_each_over_two(family: str, tmp_path: Path) -> None:
    from tests.real.families import described

    folder = described(family, tmp_path / family)
    words = typed(folder, tmp_path / "run", "model.weights=false", "steps=[certify]", *SPREAD)
    assert main(words) == 0
    assert json.loads((tmp_path / "run" / "certificate.json").read_text())["holds"]


@pytest.mark.parametrize("family", ["t5", "vit"])
def test_a_family_without_a_causal_lm_class_is_refused(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.real.families import described

    folder = described(family, tmp_path / family)
    assert main(typed(folder, tmp_path / "run", "model.weights=false", "steps=[train]")) == 2
    assert f"{folder}: transformers has no causal_lm class for {family}\n" in capsys.readouterr().err


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_a_folder_goes_in_and_comes_out_with_the_same_logits(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.real.families import weighed

    folder, run = weighed(family, tmp_path / family), tmp_path / "run"
    words = ("steps=[evaluate,save,export]", "steps.evaluate.batches=1", *SPREAD)
    assert main(typed(folder, run, *words)) == 0

    assert names(run / "exports" / "hf") == names(folder)
    out, loaded = AutoModelForCausalLM.from_pretrained(run / "exports" / "hf", output_loading_info=True)
    assert not any(loaded.values())
    tokens = torch.arange(32).reshape(2, 16)
    assert torch.equal(out(tokens).logits, AutoModelForCausalLM.from_pretrained(folder)(tokens).logits)


def names(folder: Path) -> list[str]:
    return sorted(read_hf(folder))


def test_a_setting_that_the_config_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.real.families import described

    folder = described("llama", tmp_path / "m")
    words = ("model.weights=false", "model.config={num_hidden_layer: 3}", "steps=[train]")
    assert main(typed(folder, tmp_path / "run", *words)) == 2
    text = (
        f"model.config.num_hidden_layer: LlamaConfig of {folder} has no such key, did you mean 'num_hidden_layers'?\n"
    )
    assert text in capsys.readouterr().err


CUT = {"llama": "fp64", "opt": "fp64", "gemma3_text": "fp32"}  # the table has others on one stage


@pytest.mark.parametrize("family", CUT)
def test_operators_are_cut_as_the_config_says(family: str, tmp_path: Path) -> None:
    from tests.real.families import described

    folder, run = described(family, tmp_path / family), tmp_path / "run"
    words = ("model.weights=false", "operators=auto", "parallel.grid.tp=2", PP2, "steps=[certify]")
    assert main(typed(folder, run, *words, f"steps.certify.precision={CUT[family]}")) == 0
    assert json.loads((run / "certificate.json").read_text())["holds"]
    cut = json.loads((run / "plan.json").read_text())["operators"]["spreads"]
    assert any(".layers.3." in c["operator"]["module"] for c in cut)


def test_a_config_that_says_nothing_of_tp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.real.families import described

    folder = described("gpt2", tmp_path / "gpt2")
    words = ("model.weights=false", "operators=auto", "parallel.grid.tp=2", "steps=[train]")
    assert main(typed(folder, tmp_path / "run", *words)) == 2
    text = f"auto: the config of {folder} has no tensor-parallel plan; name modules one by one\n"
    assert text in capsys.readouterr().err


def test_experts_that_look_at_numbers_are_not_followed_beside_what_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.real.families import described

    words = ("model.weights=false", "operators=auto", "parallel.grid.tp=2", "steps=[train]")
    assert main(typed(described("mixtral", tmp_path / "m"), tmp_path / "run", *words)) == 2
    assert "model.layers.0.mlp.experts branches on the values of its inputs" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_comes_back_in_its_own_dtype(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tests.real.families import weighed

    folder, run = weighed("llama", tmp_path / "m"), tmp_path / "run"
    AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).save_pretrained(folder)
    steps = "steps=[train,evaluate,save,export]"
    words = ("train.steps=2", "optim.lr=0.01", "train.batch_size=4", "launch.nproc=1")
    assert main(typed(folder, run, *words, steps, "steps.evaluate.batches=1")) == 0
    assert json.loads((run / "status.json").read_text())["metrics"]["export_gap"] < 1e-5
    out = load_file(run / "exports/hf/model.safetensors")
    assert {t.dtype for t in out.values()} == {getattr(torch, dtype)}
    assert json.loads((run / "exports/hf/config.json").read_text())["dtype"] == dtype
    rounded = f"export: weights are rounded once, to the nearest {dtype} value (steps.export.dtype)"
    assert (rounded in capsys.readouterr().out) == (dtype != "float32")

    # each number is the nearest to the trained one; with the setting it is exactly the trained one
    exact = (f"run_dir={run}", "steps=[export]", "steps.export.dtype=fp32", f"steps.export.path={tmp_path}/wide")
    assert main(typed(folder, run, *words, *exact)) == 0
    wide = load_file(tmp_path / "wide/model.safetensors")
    assert {t.dtype for t in wide.values()} == {torch.float32}
    assert all(torch.equal(out[name], t.to(out[name].dtype)) for name, t in wide.items())


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
    assert out.dtype == getattr(torch, dtype)
    weights = {name: w.float() for name, w in kept.state_dict().items()}
    assert all(torch.equal(w.float(), weights[name]) for name, w in out.state_dict().items())


OLD_KEYS: dict[str, dict[str, object]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000},
}
"""The keys of positions in folders of earlier versions of transformers."""


NEW_KEYS = [
    "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "opt", "phi3", "qwen2", "qwen3"
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "old"), [*((f, {}) for f in NEW_KEYS), *OLD_KEYS.items()],
    ids=[*NEW_KEYS, *(f"{f} of old" for f in OLD_KEYS)],
)  # fmt: skip
def test_a_folder_of_overrides_reads_back_as_what_was_trained(
    family: str, old: dict[str, object], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from tests.real.families import described

    folder, run = described(family, tmp_path / "m"), tmp_path / "run"
    if old:
        data = json.loads((folder / "config.json").read_text())
        del data["rope_parameters"]
        (folder / "config.json").write_text(json.dumps(data | old))
    x = torch.arange(32).reshape(2, 16)
    save_file({"input0": x}, tmp_path / "x.safetensors")
    words = ("model.weights=false", "model.config={num_hidden_layers: 2}", "train.steps=2", "optim.lr=0.1")
    steps = ("steps=[train,save,predict,export]", f"steps.predict.inputs={tmp_path}/x.safetensors", "launch.nproc=1")
    assert main([*typed(folder, run, *words), *steps]) == 0

    (trained,) = load_file(run / "predictions.safetensors").values()
    there = AutoModelForCausalLM.from_pretrained(run / "exports/hf", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(there(input_ids=x).logits, trained, rtol=0, atol=1e-5 * float(trained.abs().max()))


def test_a_folder_that_reads_back_as_another_model_is_not_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from launcher.models import hugging_face
    from tests.real.families import described

    right = hugging_face.exported_config_json
    monkeypatch.setattr(
        hugging_face, "exported_config_json", lambda *a: right(*a).replace('"rope_theta": ', '"rope_theta": 7')
    )
    words = ("model.weights=false", "train.steps=1", "steps=[train,save,export]", "launch.nproc=1")
    assert main(typed(described("llama", tmp_path / "m"), tmp_path / "run", *words)) == 1
    assert "the written config.json describes another model: rope_parameters" in capsys.readouterr().err
    assert [*(tmp_path / "run/exports").iterdir()] == []


def test_more_layers_than_the_folder_describes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.real.families import described

    folder = described("qwen2", tmp_path / "m")
    words = ("model.weights=false", "model.config={num_hidden_layers: 6}", "steps=[train]")
    assert main(typed(folder, tmp_path / "run", *words)) == 2
    text = (
        f"model.config.num_hidden_layers = 6: layer_types of {folder} has 4 entries, one for each layer; "
        "set model.config.layer_types with 6 entries too"
    )
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("steps.export.check=false",)], ids=["checked", "unchecked"])
def test_the_config_of_one_model_is_not_written_beside_the_weights_of_another(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.real.families import described

    llama, qwen = (described(family, tmp_path / family) for family in ("llama", "qwen2"))
    short = ("model.weights=false", "train.steps=1", "launch.nproc=1", "launch.check_memory=false")
    assert main([*typed(llama, tmp_path / "run", *short, "steps=[train,save]")]) == 0
    capsys.readouterr()

    src = tmp_path / "run/checkpoints/step-000001"
    new = ("steps=[export]", f"steps.export.src={src}", *words)
    assert main([*typed(qwen, tmp_path / "new", *short, *new)]) == 2
    said = capsys.readouterr().err
    text = f"belongs to another model than {qwen}, whose config the export would have; name that model in model.path"
    assert f"steps.export.src: {src} {text} and model.config: " in said
    assert "    try: " not in said
    assert not (tmp_path / "new").exists()

    # a checkpoint that another step makes is checked when it is there
    dst = tmp_path / "moved"
    moved = ("steps=[transform,export]", f"steps.transform.src={src}", f"steps.transform.dst={dst}")
    moved = (*moved, "steps.transform.nproc=1", f"steps.export.src={dst}", *words)
    assert main([*typed(qwen, tmp_path / "new", *short, *moved)]) == 1
    assert f" {text} and model.config: " in capsys.readouterr().err
    assert not (tmp_path / "new/exports/hf").exists()
