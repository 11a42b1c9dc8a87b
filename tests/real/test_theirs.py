"""Models as transformers ships them: split and sharded automatically, and certified."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.job.compose import compose
from launcher.planner.plan_job import plan_job

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="not installed: transformers; make test-real installs it"
)

LAYERS = {"Gpt2": "m.transformer.h", "Llama": "m.model.layers"}
LAYOUTS = {
    "2 stages, each over 2": (
        "parallel.pipeline={stages: 2, micro_batch_num: 4}",
        "parallel.hsdp={shard_size: 2, threshold: 0}",
    ),
    "2 stages x level3": (
        "parallel.pipeline={stages: 2, micro_batch_num: 4}",
        "parallel.hsdp={shard_size: 2, threshold: 0, optimizer_level: level3}",
    ),
    "level3 over 4": ("parallel.hsdp={shard_size: 4, threshold: 0, optimizer_level: level3}",),
}

OPERATORS = {
    "m.model.embed_tokens": "[tp, null]",
    **{f"m.model.layers.*.self_attn.{n}_proj": "[tp, null]" for n in "qkv"},
    "m.model.layers.*.self_attn.o_proj": "[null, tp]", "m.model.layers.*.mlp.gate_proj": "[tp, null]",
    "m.model.layers.*.mlp.up_proj": "[tp, null]", "m.model.layers.*.mlp.down_proj": "[null, tp]",
    "m.lm_head": "[tp, null]",
}  # fmt: skip
SPREAD = {
    "2 stages x tp 2": ("parallel.pipeline={stages: 2, micro_batch_num: 2}",),
    "tp 2 x level3": ("parallel.hsdp={shard_size: 2, threshold: 0, optimizer_level: level3}",),
}


def words(model: str, layout: tuple[str, ...]) -> list[str]:
    return [
        "recipe=lm_single", "model=null", f"model._target_=tests.real.theirs.{model}", "security.allow=[tests]",
        "data=random_tokens", "data.vocab_size=64", "data.seq_len=16", "train.batch_size=16", "steps=[certify]",
        "launch.nproc=4", *layout,
    ]  # fmt: skip


def certified(typed: list[str], folder: Path) -> bool:
    assert main([*typed, f"run_dir={folder}", "logger=plain"]) == 0
    return bool(json.loads((folder / "certificate.json").read_text())["holds"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", LAYERS)
def test_a_model_of_transformers_is_certified_with_every_layer_on_its_own(
    model: str, layout: str, tmp_path: Path
) -> None:
    typed = words(model, LAYOUTS[layout])
    plan = plan_job(compose(typed).job)
    layers = [f"{LAYERS[model]}.{n}" for n in range(4)]
    assert [m for g in plan.groups for m in g.modules if m in layers] == layers
    if len(plan.stages) == 2:
        assert [m for s in plan.stages for m in s.modules if m in layers] == layers
        assert [layers[1] in s.modules for s in plan.stages] == [True, False]
        assert [layers[2] in s.modules for s in plan.stages] == [False, True]
        assert len(plan.ties) == 1
    assert certified(typed, tmp_path / "run")


@pytest.mark.parametrize("layout", SPREAD)
def test_a_llama_of_transformers_is_certified_with_its_operators_cut(layout: str, tmp_path: Path) -> None:
    cut = ", ".join(f"{module}: {{weight: {axes}}}" for module, axes in OPERATORS.items())
    typed = [*words("Llama", SPREAD[layout]), "parallel.grid.tp=2", f"parallel.operators={{{cut}}}"]
    assert certified(typed, tmp_path / "run")
