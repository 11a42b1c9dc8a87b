"""``model.config`` overrides a folder's ``config.json``, under current and earlier key names, and with lists."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.models import HuggingFace

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="not installed: transformers; make test-real installs it"
)

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def config(path: Path, **changes: Any) -> Any:
    from launcher.models.hugging_face import config_of

    return config_of(HuggingFace(name="hf", path=str(path), config=changes))


def refusal(path: Path, **changes: Any) -> str:
    with pytest.raises(RequestError) as caught:
        config(path, **changes)
    return str(caught.value)


def described(family: str, folder: Path) -> Path:
    from tests.real import families

    return families.described(family, folder)


@pytest.mark.parametrize("changes", [
    {"rope_theta": 7.0}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
], ids=str)  # fmt: skip
def test_rope_keys_of_before_mean_what_transformers_reads_from_a_config_that_has_them(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    theirs = described("llama", tmp_path / "theirs") / "config.json"
    written = {key: value for key, value in json.loads(theirs.read_text()).items() if key != "rope_parameters"}
    theirs.write_text(json.dumps(written | changes))
    want = AutoConfig.from_pretrained(theirs.parent).rope_parameters
    got = config(described("llama", tmp_path / "ours"), **changes).rope_parameters
    assert {key: value for key, value in want.items() if key != "type"} == got


def test_a_part_of_rope_parameters_changes_that_part(tmp_path: Path) -> None:
    path = described("llama", tmp_path)
    assert config(path, rope_parameters={"rope_theta": 7}).rope_parameters == {"rope_theta": 7, "rope_type": "default"}
    assert config(path, rope_parameters=None).rope_parameters["rope_type"] == "default"
    of_gemma = described("gemma3_text", tmp_path / "gemma")
    was = config(of_gemma).rope_parameters
    now = config(of_gemma, rope_parameters={"full_attention": {"rope_theta": 7.0}}).rope_parameters
    assert now == was | {"full_attention": was["full_attention"] | {"rope_theta": 7.0}}


@pytest.mark.parametrize(("family", "changes", "text"), [
    ("llama", {"rope_parameters": {"rope_type": "llama4"}}, "model.config.rope_parameters: rope_parameters have "
     "rope_type llama4 (default, linear, "),
    ("llama", {"rope_scaling": 4}, "model.config.rope_scaling: 4: rope_parameters are null or a mapping, such as "),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "Missing required keys"),
    ("llama", {"rope_theta": "a"}, "rope_parameters have rope_theta 'a', which is not a number"),
    ("gemma3_text", {"rope_theta": 7.0}, "has rope_parameters for each kind of layer, "),
], ids=str)  # fmt: skip
def test_rope_parameters_that_no_model_can_have_are_refused_by_name(
    family: str, changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    found = refusal(described(family, tmp_path), **changes)
    assert text in found
    assert "rope_parameters" in found


def test_lists_of_layers_have_an_entry_for_each_layer(tmp_path: Path) -> None:
    path = described("qwen2", tmp_path)
    full = ["full_attention"]
    text = "model.config.layer_types: it lists {} values, but the model has {} layers; set one for each layer"
    assert refusal(path, layer_types=full * 3) == text.format(3, 4)
    assert refusal(path, layer_types=full * 4, num_hidden_layers=2) == text.format(4, 2)
    assert config(path, layer_types=full * 6, num_hidden_layers=6).layer_types == full * 6
    assert config(path, num_hidden_layers=2).layer_types == full * 2


def test_a_list_that_is_as_long_as_the_layers_by_chance_is_left_alone(tmp_path: Path) -> None:
    path = described("llama", tmp_path)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {"eos_token_id": [1, 2, 3, 4]}))
    assert config(path, num_hidden_layers=2).eos_token_id == [1, 2, 3, 4]
    assert config(path, eos_token_id=[1, 2]).eos_token_id == [1, 2]


@pytest.mark.parametrize(("family", "without", "changes"), [
    ("llama", ["head_dim"], {"num_attention_heads": 8}),
    ("qwen2", ["layer_types"], {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen2", ["layer_types"], {"num_hidden_layers": 6}),
    ("gpt2", [], {"num_hidden_layers": 2, "hidden_size": 64}),
    ("gpt_neox", ["rope_parameters"], {"rotary_pct": 0.5, "rotary_emb_base": 100}),
    ("gemma3_text", ["layer_types"], {"sliding_window_pattern": 2}),
], ids=str)  # fmt: skip
def test_a_change_means_the_config_that_has_it_with_all_that_its_class_computes(
    family: str, without: list[str], changes: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    ours, theirs = described(family, tmp_path / "ours"), described(family, tmp_path / "theirs")
    old = {"rotary_pct": 0.25, "rotary_emb_base": 10000, "sliding_window_pattern": 4}  # keys of earlier versions
    written = {k: v for k, v in json.loads((ours / "config.json").read_text()).items() if k not in without}
    written |= {k: v for k, v in old.items() if k in changes}
    (ours / "config.json").write_text(json.dumps(written))
    names = AutoConfig.from_pretrained(ours).attribute_map
    (theirs / "config.json").write_text(json.dumps(written | {names.get(k, k): v for k, v in changes.items()}))
    assert saved(config(ours, **changes)) == saved(AutoConfig.from_pretrained(theirs))


def saved(config: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in data.items() if key not in ("_name_or_path", "experts_implementation")}


def test_explicit_values_of_a_config_file_stay_and_are_noted(tmp_path: Path) -> None:
    from launcher.models.hugging_face import stale

    def found(family: str, **changes: Any) -> list[tuple[str, Any, Any]]:
        return stale(HuggingFace(name="hf", path=str(described(family, tmp_path / family)), config=changes))

    assert found("llama", num_attention_heads=8) == [("head_dim", 8, 4)]
    assert found("llama", num_hidden_layers=2, vocab_size=100, rope_theta=7.0) == []
    assert found("gemma2", num_hidden_layers=2) == []


@pytest.mark.parametrize(("family", "changes", "name", "cure"), [
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3, "num_hidden_layers": 4},
     "use_sliding_window: true: layer_types",
     "layer_types=[full_attention,full_attention,full_attention,sliding_attention]"),
    ("smollm3", {"no_rope_layer_interval": 2, "num_hidden_layers": 3}, "no_rope_layer_interval: 2: no_rope_layers",
     "no_rope_layers=[1,0,1]"),
], ids=["qwen2", "smollm3"])  # fmt: skip
def test_a_change_that_a_list_of_layers_leaves_without_effect_is_refused(
    family: str, changes: dict[str, Any], name: str, cure: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4} if family == "qwen2" else {}
    AutoConfig.for_model(family, num_hidden_layers=4, **windows).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | dict.fromkeys([*windows][:1], False))
    )
    text = f"model.config.{name} of {tmp_path} has one entry per layer, which overrides this; "
    text += f"set {cure.partition('=')[0]} too"
    assert refusal(tmp_path, **changes) == f"{text} (try: 'model.config.{cure}')"
    key, _, values = cure.partition("=")
    entries = [int(v) if v.isdigit() else v for v in values.strip("[]").split(",")]
    assert getattr(config(tmp_path, **changes, **{key: entries}), key) == entries


def test_a_list_of_layers_by_number_is_not_cut(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(num_hidden_layers=4, mlp_only_layers=[3, 2, 1, 0]).save_pretrained(tmp_path)
    assert config(tmp_path, num_hidden_layers=2).mlp_only_layers == [3, 2, 1, 0]


def test_a_list_of_numbers_that_the_class_makes_for_each_layer_is_cut(tmp_path: Path) -> None:
    from transformers import SmolLM3Config

    SmolLM3Config(num_hidden_layers=4, no_rope_layer_interval=2).save_pretrained(tmp_path)
    assert config(tmp_path, num_hidden_layers=3).no_rope_layers == [1, 0, 1]


def test_a_part_of_a_config_is_changed_by_the_same_rules(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    text = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    Gemma3Config(text_config=text).save_pretrained(tmp_path)
    was, now = config(tmp_path).text_config, config(tmp_path, text_config={"num_hidden_layers": 2}).text_config
    assert (now.num_hidden_layers, now.layer_types) == (2, was.layer_types[:2])
    assert (now.hidden_size, now.rope_parameters) == (32, was.rope_parameters)
    assert refusal(tmp_path, text_config={"num_hidden_layer": 2}) == (
        f"model.config.text_config.num_hidden_layer: Gemma3TextConfig of {tmp_path} has no such key, "
        "did you mean 'num_hidden_layers'?"
    )


@pytest.mark.parametrize("key", ["save_pretrained", "to_dict"])
def test_a_method_is_no_setting(key: str, tmp_path: Path) -> None:
    path = described("llama", tmp_path)
    assert refusal(path, **{key: 3}).startswith(f"model.config.{key}: LlamaConfig of {path} has no such key")


def test_the_config_of_a_model_that_also_sees_is_written_as_it_was_read(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    from launcher.models.hugging_face import exported_config_json, from_folder, unlike_settings

    text = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    seen = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    Gemma3Config(text_config=text, vision_config=seen).save_pretrained(tmp_path)
    settings = HuggingFace(name="hf", path=str(tmp_path), weights=False)
    assert not from_folder(settings).config.text_config.use_cache
    (tmp_path / "config.json").write_text(exported_config_json(settings, "float32"))
    assert config(tmp_path).text_config.use_cache
    assert unlike_settings(settings, str(tmp_path)) == []
