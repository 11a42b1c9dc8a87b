"""``model.config``: overrides of a folder's ``config.json``, under names of today and of before, and lists."""

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
    text = "model.config.layer_types: it lists {} values, and the model has {} layers; give one for each layer"
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
