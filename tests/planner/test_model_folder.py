"""What is refused of a model folder; no test needs transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from launcher.checkpoint.foreign.import_checkpoint import form_of
from launcher.checkpoint.layout.derive_strategy import strategy_of_plan
from launcher.checkpoint.tensorfile.safetensors import sliced, write_stream
from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema.models import HuggingFace
from launcher.optional import install_command
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.planner import hugging_face_checks, router_losses, trace_model
from launcher.planner.plan_job import plan_job
from launcher.untrusted.hub_name_hint import download_hint

NAME = "name a folder that save_pretrained of transformers has written"


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
    text = f"it has no config.json, so the kind of model is unknown; {NAME}"
    assert problems(tmp_path) == [f"model.path: {tmp_path}: {text}"]


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "config.json").write_text("{")
    (found,) = problems(path)
    assert found.startswith(f"model.path: {path / 'config.json'}: ")


def test_a_config_that_names_no_model(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"hidden_size": 2})
    text = f"it has no model_type, so the kind of model is unknown; {NAME}"
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


LAYERS = "a model has 1 to 1000 layers"
PARTS = "a model has at most 10000 of these"
SIZES = "no model has a size above 67108864"
NO_KERNELS = "the launcher runs no downloaded kernels"
BEYOND = {
    "layers": ({"num_hidden_layers": 10**9}, f"num_hidden_layers is 1000000000; {LAYERS}"),
    "layers that a plan would trace for minutes": (
        {"num_hidden_layers": 10_000}, f"num_hidden_layers is 10000; {LAYERS}"
    ),
    "fewer than no layers": ({"num_hidden_layers": -3}, f"num_hidden_layers is -3; {LAYERS}"),
    "no layers": ({"n_layer": 0}, f"n_layer is 0; {LAYERS}"),
    "nested": ({"text_config": {"n_layer": 20_000}}, f"text_config.n_layer is 20000; {LAYERS}"),
    "layers in a list": ({"depths": [10**9, 1]}, f"depths is 1000000000; {LAYERS}"),
    "layers in a nested list": ({"vision": {"depths": [1, [2000]]}}, f"vision.depths is 2000; {LAYERS}"),
    "layers of all stages": ({"depths": [500] * 3}, f"depths has 1500 layers in all; {LAYERS}"),
    "a config in a list": ({"parts": [{"depth": 1001}]}, f"parts.depth is 1001; {LAYERS}"),
    "an infinite count": ({"num_layers": float("inf")}, f"num_layers is inf; {LAYERS}"),
    "experts": ({"num_local_experts": -(10**6)}, f"num_local_experts is -1000000; {PARTS}"),
    "inputs": ({"altup_num_inputs": 10**9}, f"altup_num_inputs is 1000000000; {PARTS}"),
    "labels": ({"num_labels": 10**9}, "num_labels is 1000000000; at most 50000 labels are built"),
    "named labels": (
        {"id2label": {str(i): "x" for i in range(50_001)}}, "id2label has 50001 entries; at most 50000 are read"
    ),
    "a size": ({"hidden_size": 2**41}, f"hidden_size is 2199023255552; {SIZES}"),
    "positions": ({"n_positions": 2**27}, f"n_positions is 134217728; {SIZES}"),
    "sizes in a list": ({"hidden_sizes": [8, 2**27]}, f"hidden_sizes is 134217728; {SIZES}"),
    "an unknown number": ({"mystery": -(2**41)}, "mystery is -2199023255552; it is not a model size"),
    "a list": ({"layer_types": ["a"] * 10_001}, "layer_types lists 10001 values; at most 10000 are read"),
    "keys": ({f"k{i}": i for i in range(10_000)}, "it has 10001 keys; at most 10000 are read"),
    "nested keys": ({"a": {str(i): {"b": 1} for i in range(6000)}}, "it has 10001 keys; at most 10000 are read"),
    "a kernel": ({"attn_implementation": "someone/kernel"}, f"attn_implementation is someone/kernel: {NO_KERNELS}"),
    "a kernel, as saved": (
        {"_attn_implementation": "someone/kernel@v1"}, f"_attn_implementation is someone/kernel@v1: {NO_KERNELS}"
    ),
    "a kernel of experts": (
        {"experts_implementation": "someone/moe"}, f"experts_implementation is someone/moe: {NO_KERNELS}"
    ),
    "a kernel of a part": (
        {"any_implementation": {"vision": "a/kernel"}}, f"any_implementation.vision is a/kernel: {NO_KERNELS}"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "text"), BEYOND.values(), ids=BEYOND)
def test_absurd_sizes_in_a_config_are_refused_before_the_model_is_built(
    tmp_path: Path, config: dict[str, object], text: str
) -> None:
    there = folder(tmp_path / "m", {"model_type": "llama"} | config)
    assert problems(there) == [f"model.path: {there}/config.json: {text}"]


def test_a_change_of_the_config_obeys_the_same_law(tmp_path: Path) -> None:
    there = folder(tmp_path / "m")
    text = f"model.path: {there}/config.json: depths is 2000; {LAYERS}"
    assert problems(there, "model.config={depths: [2000]}") == [text]


def test_a_file_full_of_hostile_numbers_is_reported_in_a_few_lines(tmp_path: Path) -> None:
    there = folder(tmp_path / "m", {"model_type": "llama", "hidden_sizes": [2**30] * 10_000})
    assert len(problems(there)) == 3


PUBLISHED = {
    "Llama 3.1 405B": {
        "num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256,
        "num_attention_heads": 128, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "eos_token_id": [128001, 128008, 128009],
        "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "Llama 4 Scout": {"text_config": {"max_position_embeddings": 10485760, "num_local_experts": 16}},
    "DeepSeek-V3": {
        "n_routed_experts": 256, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "n_group": 8,
        "q_lora_rank": 1536, "vocab_size": 129280, "n_shared_experts": 1, "num_hidden_layers": 61,
    },
    "Gemma 3": {"vocab_size": 262208, "max_position_embeddings": 1048576, "sliding_window": 1024, "pad_token_id": 0},
    "Gemma 3n": {"altup_num_inputs": 4, "num_kv_shared_layers": 15, "layer_types": ["full_attention"] * 35},
    "LLaVA": {"vision_feature_layer": -2, "image_token_index": 32000, "vision_config": {"num_hidden_layers": 24}},
    "Swin": {"depths": [2, 2, 18, 2], "image_size": [384, 384], "num_heads": [6, 12, 24, 48], "patch_size": 4},
    "Bamba": {"time_step_limit": [0.0, float("inf")], "num_experts": 0, "sliding_window": -1},
    "ImageNet-21k": {"id2label": {str(i): str(i) for i in range(21_843)}},
    "others": {
        "shared_expert_intermediate_size": 20480, "block_size": 131072, "max_window_layers": 80,
        "rope_theta": 100_000_000_000, "num_parameters": 405_000_000_000, "attn_implementation": "sdpa",
    },
}  # fmt: skip


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_sizes_of_published_models_are_none_of_these(tmp_path: Path, config: dict[str, object]) -> None:
    assert problems(folder(tmp_path / "m", {"model_type": "llama"} | config), "data.vocab_size=8") == []


@pytest.mark.parametrize(
    ("endless", "limit"),
    [
        (lambda: [nn.Sequential(nn.Module()) for _ in range(30_000)], "more than 20000 modules"),
        (lambda: [bytearray(1 << 20) for _ in range(2000)], "more than 512 MiB"),
        (lambda: all(True for _ in count()), "more than 0.2 s"),
    ],
    ids=["modules", "memory", "time"],
)
def test_a_model_that_grows_by_keys_that_nobody_knows_ends(
    endless: Callable[[], object], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "0.2 s" in limit:
        monkeypatch.setattr(trace_model, "BUILD_S", 0.2)
    job = SimpleNamespace(model=HuggingFace(name="hf", path="m"), train=SimpleNamespace(precision="fp32"), seed=0)
    with pytest.raises(RequestError) as refused:
        trace_model.read(job, endless)  # type: ignore[arg-type]
    text = f"model.path: m: its config.json describes a model that takes {limit}, without its weights"
    assert str(refused.value) == text


def test_a_failure_of_transformers_is_quoted_without_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> nn.Module:
        raise ValueError("\nwhy not\nand more")

    job = SimpleNamespace(model=HuggingFace(name="hf", path="m"), train=SimpleNamespace(precision="fp32"), seed=0)
    with pytest.raises(RequestError) as refused:
        trace_model.read(job, failing)  # type: ignore[arg-type]
    assert str(refused.value) == "model.path: m: cannot be built: ValueError: why not"


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


def test_code_that_a_config_names_is_refused_without_an_address(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from launcher.models.hugging_face import config_of

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "conf.C"}}))
    with pytest.raises(RequestError) as refused:
        config_of(HuggingFace(name="hf", path=str(tmp_path)))
    text = "transformers has no model of type evil, and the code that auto_map in its config.json names is not run"
    assert str(refused.value) == f"model.path: {tmp_path}: {text}"
