"""What is refused of a model folder; no test needs transformers."""

from __future__ import annotations

import json
import re
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.checkpoint.foreign.read import form_of
from launcher.checkpoint.layout.derive_strategy import strategy_of_plan
from launcher.checkpoint.tensorfile.safetensors import sliced, write_stream
from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema.models import HuggingFace
from launcher.optional import install_command
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.planner import hugging_face_checks, router_losses
from launcher.planner.plan_job import plan_job
from launcher.untrusted.hub import download_hint


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that transformers is installed, because these tests only read folders."""
    monkeypatch.setattr(hugging_face_checks, "find_spec", lambda name: ModuleSpec(name, None))


def problems(folder: Path, *words: str) -> list[str]:
    typed = ["recipe=lm_single", "model=hf", f"model.path={folder}", "data=random_tokens", "data.vocab_size=64", *words]
    return [str(p) for p in hugging_face_checks.check(compose([*typed, "steps=[train]"]).job, 64, 64)]


def folder(path: Path, config: object = None) -> Path:
    """Write a model folder with one tensor."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    specs = {"lm_head.weight": TensorSpec((2,), "float32")}
    write_stream(path / "model.safetensors", specs, lambda _: sliced(memoryview(bytes(8))), {})
    return path


def test_a_whole_folder_is_fine(tmp_path: Path) -> None:
    assert problems(folder(tmp_path / "m")) == []


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_would_have_no_effect_is_refused(tmp_path: Path, key: str) -> None:
    text = "it has no effect; train.precision sets the dtype of the computation, steps.export.dtype that of an export"
    assert problems(folder(tmp_path / "m"), f"model.config={{{key}: float16}}") == [
        f"model.config.{key}: float16: {text}"
    ]


def test_a_config_of_quantized_weights_is_refused_before_an_export_that_nobody_can_open(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    path = folder(tmp_path / "m", config)
    text = "this config is for quantized weights, but the launcher trains and exports unquantized ones"
    key = "model.config.quantization_config"
    assert problems(path) == [f"{key}: {text} (try: {key}=null)"]
    assert problems(path, "model.config={quantization_config: null}") == []


def test_a_file_that_would_make_an_export_unreadable_is_found_before_the_training(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "generation_config.json").write_text("{bad")
    assert problems(path) == []
    words = ["recipe=lm_single", "model=hf", f"model.path={path}", "data=random_tokens", "data.vocab_size=64"]
    (problem,) = hugging_face_checks.check(compose([*words, "steps=[train,save,export]"]).job, 64, 64)
    why = "an export would contain a copy of this file, which transformers cannot read"
    text = f"{path}/generation_config.json: {why}: "
    assert (problem.key, problem.text[: len(text)]) == ("model.path", text)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert problems(path) == [f"model.path: {path}: no such folder"]


def test_a_name_on_the_hub_is_told_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "meta-llama/Llama-3.2-1B"
    told = download_hint(name, "model")
    assert told.endswith(f"this command does: hf download {name} --local-dir {name}")
    assert problems(Path(name)) == [f"model.path: {name}: no such folder{told}"]
    with pytest.raises(ValueError, match=re.escape(f"{name}: no such file or folder{told}")):
        form_of(Path(name))
    Path("meta-llama").mkdir()
    assert problems(Path(name)) == [f"model.path: {name}: no such folder"]


def test_a_folder_without_config(tmp_path: Path) -> None:
    text = "it has no config.json, so the kind of model is unknown"
    assert problems(tmp_path) == [f"model.path: {tmp_path}: {text}"]


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "config.json").write_text("{")
    (found,) = problems(path)
    assert found.startswith(f"model.path: {path / 'config.json'}: ")


def test_a_config_that_names_no_model(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"hidden_size": 2})
    text = "it has no model_type, so the kind of model is unknown"
    assert problems(path) == [f"model.path: {path / 'config.json'}: {text}"]


def test_a_vocabulary_that_is_too_small_for_the_data(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"model_type": "llama", "vocab_size": 63})
    text = "vocab_size 63 is too small for the 64 tokens of the data; use the tokenizer of this model"
    assert problems(path) == [f"model.path: {path / 'config.json'}: {text}"]
    assert problems(path, "model.config={vocab_size: 64}") == []


def test_labels_that_are_too_few_for_the_classes_of_the_data(tmp_path: Path) -> None:
    path, task = folder(tmp_path / "m", {"model_type": "vit"}), "model.task=image_classification"
    text = "2 labels are too few for the 64 classes of the data (try: model.config.num_labels=64)"
    assert problems(path, task) == [f"model.path: {path / 'config.json'}: {text}"]
    assert problems(path, task, "model.config.num_labels=64") == []


def test_logits_of_routers_are_refused_by_their_name(tmp_path: Path) -> None:
    path, key = folder(tmp_path / "m", {"model_type": "mixtral", "output_router_logits": True}), "output_router_logits"
    text = "true: the forward would also return router logits, but the launcher trains no router loss"
    told = [f"model.config.{key}: {text} (try: model.config.{key}=false)"]
    assert problems(path) == told
    assert problems(path, f"model.config={{{key}: false}}") == []
    assert problems(folder(tmp_path / "n"), f"model.config={{{key}: true}}") == told

    part = folder(tmp_path / "o", {"model_type": "llama4", "text_config": {key: True}})
    told = [f"model.config.text_config.{key}: {text} (try: model.config.text_config.{key}=false)"]
    assert problems(part) == told
    assert problems(part, f"model.config={{text_config: {{{key}: false}}}}") == []


@pytest.mark.parametrize(("coefficient", "told"), [(0.1, True), (0.0, False), (None, False)])
def test_the_plan_says_that_no_loss_of_routers_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coefficient: float | None, told: bool
) -> None:
    of_text = SimpleNamespace(router_aux_loss_coef=coefficient)
    config = SimpleNamespace(get_text_config=lambda decoder: of_text)
    monkeypatch.setattr("launcher.models.hugging_face.config_of", lambda settings: config)
    words = ["recipe=lm_single", "model=hf", f"model.path={folder(tmp_path / 'm')}", "model.weights=false"]
    found = [
        str(n) for n in router_losses.untrained_losses(compose([*words, "data=random_tokens", "steps=[train]"]).job)
    ]
    text = "model router_aux_loss_coef 0.1 of its config has no effect: the launcher trains no router loss"
    assert found == ([text] if told else [])


def test_a_folder_without_weights_is_fine_for_a_new_model(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors").unlink()
    text = f"{path}: it has neither model.safetensors nor model.safetensors.index.json"
    assert problems(path) == [f"model.path: {text} (try: model.weights=false)"]
    assert problems(path, "model.weights=false") == []


def test_weights_that_are_cut_short(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    (found,) = problems(path)
    assert found.startswith(f"model.path: {file}: ")
    assert found.endswith(" (try: model.weights=false)")


def test_transformers_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face_checks, "find_spec", lambda name: None)
    text = f"model: hf: transformers is not installed: {install_command('hf')}"
    assert problems(folder(tmp_path / "m")) == [text]


BEYOND = {
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 10000 are built"),
    "nested": ({"text_config": {"n_layer": 20_000}}, "text_config.n_layer is 20000; at most 10000 are built"),
    "experts": ({"num_local_experts": -(10**6)}, "num_local_experts is -1000000; at most 10000 are built"),
    "a size": ({"hidden_size": 2**41}, "hidden_size is 2199023255552, which is not a model size"),
    "a list": ({"layer_types": ["a"] * 10_001}, "layer_types lists 10001 values; at most 10000 are read"),
    "a kernel": (
        {"attn_implementation": "someone/kernel"},
        "attn_implementation is someone/kernel: the launcher runs no downloaded kernels",
    ),
    "a kernel, as saved": (
        {"_attn_implementation": "someone/kernel@v1"},
        "_attn_implementation is someone/kernel@v1: the launcher runs no downloaded kernels",
    ),
}


@pytest.mark.parametrize(("config", "text"), BEYOND.values(), ids=BEYOND)
def test_what_no_model_has_is_refused_before_it_is_built(tmp_path: Path, config: dict[str, object], text: str) -> None:
    there = folder(tmp_path / "m", {"model_type": "llama"} | config)
    assert problems(there) == [f"model.path: {there}/config.json: {text}"]


def test_sizes_of_published_models_are_none_of_these(tmp_path: Path) -> None:
    there = folder(
        tmp_path / "m",
        {
            "model_type": "llama",
            "shared_expert_intermediate_size": 20480,
            "block_size": 131072,
            "max_window_layers": 80,
        },
    )
    assert problems(there) == []


def test_a_head_of_its_own_is_no_copy_of_the_embedding(tmp_path: Path) -> None:
    asked = compose(
        [
            "recipe=lm_single",
            "model=lm",
            "model.tied=true",
            "data=random_tokens",
            "data.vocab_size=64",
            "steps=[train]",
        ]
    ).job
    plan = plan_job(asked)
    [(first, tied)] = [(n, e) for n, e in strategy_of_plan(plan).only("param").entries.items() if e.aliases]
    names = (first, *tied.aliases)
    specs = {n: e.spec for n, e in strategy_of_plan(plan).only("param", "buffer").entries.items()}
    specs |= dict.fromkeys(names, tied.spec)

    def found(last: int) -> list[str]:
        there = folder(tmp_path / f"head {last}")
        write_stream(there / "model.safetensors", specs, lambda n: sliced(memoryview(
            bytes(specs[n].nbytes - 1) + bytes([last if n == names[1] else 0])
        )), {})  # fmt: skip
        job = asked.model_copy(update={"model": HuggingFace(name="hf", path=str(there))})
        return [str(p) for p in hugging_face_checks.misfits(job, plan)]

    assert found(0) == []
    text = f"{names[0]} and {names[1]} are one tensor of the model, but the folder has different values for them"
    cure = "(try: model.config.tie_word_embeddings=false)"
    assert found(7) == [f"model.path: {tmp_path}/head 7: {text} {cure}"]


@pytest.mark.parametrize(
    ("config", "changes", "text"),
    [
        ({"num_hidden_layers": 4}, {}, "model.path: {at}: the folder has no weights for the model's {last}"),
        (
            {"num_hidden_layers": 4},
            {"num_hidden_layers": 2},
            "model.config.num_hidden_layers: 2: the weights in {at} do not fit: the folder has no weights for the "
            "model's {last}; they fit model.config.num_hidden_layers=4 (try: model.weights=false)",
        ),
        (
            {"num_hidden_layers": 4, "hidden_act": "silu"},
            {"num_hidden_layers": 2, "hidden_act": "gelu"},
            "model.config: num_hidden_layers=2, hidden_act=gelu: the weights in {at} do not fit: the folder has no "
            "weights for the model's {last}; they fit model.config.num_hidden_layers=4 model.config.hidden_act=silu "
            "(try: model.weights=false)",
        ),
        (
            {},
            {"tie_word_embeddings": False},
            "model.config.tie_word_embeddings: false: the weights in {at} do not fit: the folder has no weights for "
            "the model's {last}; they fit model.config.tie_word_embeddings=true; to train a separate head, save the "
            "folder with a copy of the embedding as head",
        ),
        (
            {},
            {"attn_implementation": "eager"},
            "model.path: {at}: the folder has no weights for the model's {last}",
        ),
    ],
    ids=["no change", "layers", "two changes", "an untied head", "a kernel"],
)
def test_weights_that_do_not_fit_are_refused_at_the_key_that_changes_the_model(tmp_path, config, changes, text):
    asked = compose(["recipe=lm_single", "model=lm_tiny", "data=random_tokens", "data.vocab_size=256", "steps=[train]"])
    plan = plan_job(asked.job)
    specs = {n: e.spec for n, e in strategy_of_plan(plan).only("param", "buffer").entries.items()}
    last = [*specs][-1]
    del specs[last]
    there = folder(tmp_path / "hf", {"model_type": "llama", **config})
    write_stream(there / "model.safetensors", specs, lambda n: sliced(memoryview(bytes(specs[n].nbytes))), {})
    job = asked.job.model_copy(update={"model": HuggingFace(name="hf", path=str(there), config=changes)})
    assert [str(p) for p in hugging_face_checks.misfits(job, plan)] == [text.format(at=there, last=last)]


def test_the_reason_of_a_config_class_is_not_lost(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from launcher.models.hugging_face import config_of

    transformers.LlamaConfig(hidden_size=32).save_pretrained(tmp_path)
    with pytest.raises(RequestError) as refused:
        config_of(HuggingFace(name="hf", path=str(tmp_path), config={"hidden_size": None}))
    assert str(refused.value) == (
        f"model.config.hidden_size: null: {tmp_path} cannot be built: Field 'hidden_size' expected int, got NoneType "
        "(value: None)"
    )
