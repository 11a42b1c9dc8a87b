"""Complete runs that train adapters: from new weights, from a checkpoint without adapters, and exported again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher.__main__ import main
from launcher.checkpoint.layout.strategy import single
from launcher.checkpoint.read import open_checkpoint, read_rank
from launcher.job.schema.models import LanguageModel, Lora
from launcher.models.build import build_model
from launcher.runtime.training.checkpoint_tensors import unpacked
from tests.run.launching import TINY, losses, metrics, run, shape, status, tensors

MODULES = ("layers.*.attn.*", "layers.1.mlp.up")
LORA = f"model.lora={{rank: 4, alpha: 8, modules: [{', '.join(MODULES)}]}}"
SIZES = {"vocab_size": 64, "dim": 16, "layers": 2, "heads": 2}


def weights_of_checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the full weights of a checkpoint."""
    checkpoint = open_checkpoint(folder / "checkpoints" / f"step-{step:06d}")
    found = read_rank(checkpoint, single(checkpoint.strategy), 0, kinds=("param", "buffer"))
    return {name: unpacked(b) for name, b in found.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = ("steps=[train,evaluate,save]", "steps.evaluate.batches=1")
    return run(tmp_path_factory.mktemp("base") / "run", *steps, "schedule=constant", "optim.lr=0.01", steps=3)


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters on the weights of ``base``, in another layout, exported in both forms."""
    steps = ("steps=[load,evaluate,train,save,export]", f"steps.load.path={base}/checkpoints/step-000003")
    more = ("steps.evaluate.batches=1", "schedule=constant", "optim.lr=0.01", *shape(pp=2))
    folder = run(tmp_path_factory.mktemp("lora") / "run", *steps, *more, LORA, steps=6)
    return run(folder, *steps, *more, LORA, "steps.export.lora=separate", steps=6)


def test_adapters_begin_beside_the_weights_of_a_checkpoint_that_has_none(base: Path, tuned: Path) -> None:
    before, after = weights_of_checkpoint(base, 3), weights_of_checkpoint(tuned, 6)
    assert {n for n in after if n not in before} == {
        f"{m}.lora_{ab}" for ab in "AB"
        for m in (*(f"layers.{i}.attn.{x}" for i in (0, 1) for x in "qkvo"), "layers.1.mlp.up")
    }  # fmt: skip
    assert all(torch.equal(after[n], t) for n, t in before.items())
    assert after["layers.1.mlp.up.lora_B"].any()
    start = next(row["val_loss"] for row in metrics(tuned) if "val_loss" in row)
    assert start == pytest.approx(status(base)["metrics"]["val_loss"], rel=1e-6)
    states = open_checkpoint(tuned / "checkpoints" / "step-000006").strategy.only("optim").entries
    assert {n.split(".", 2)[2] for n in states} == after.keys() - before.keys()


def test_the_merged_file_is_a_plain_model_with_the_same_logits(tuned: Path) -> None:
    adapted = build_model(LanguageModel(name="lm", **SIZES, lora=Lora(rank=4, alpha=8, modules=MODULES)))
    plain = build_model(LanguageModel(name="lm", **SIZES))
    adapted.load_state_dict(weights_of_checkpoint(tuned, 6), strict=False)
    file = load_file(tuned / "exports" / "model.safetensors")
    assert plain.load_state_dict(file, strict=False).unexpected_keys == []
    assert not torch.equal(file["layers.0.attn.q.weight"], weights_of_checkpoint(tuned, 6)["layers.0.attn.q.weight"])
    tokens = torch.randint(64, (2, 8))
    torch.testing.assert_close(plain(tokens), adapted(tokens), rtol=1e-5, atol=1e-6)


def test_adapters_by_themselves_are_a_folder_of_peft(tuned: Path) -> None:
    folder = tuned / "exports" / "adapter"
    config, file = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    assert {k: config[k] for k in ("peft_type", "r", "lora_alpha", "bias", "fan_in_fan_out", "lora_dropout")} == {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "fan_in_fan_out": False, "lora_dropout": 0.0,
    }  # fmt: skip
    assert len(config["target_modules"]) == 9
    want = weights_of_checkpoint(tuned, 6)
    assert file.keys() == {f"base_model.model.{m}.lora_{ab}.weight" for m in config["target_modules"] for ab in "AB"}
    for module in config["target_modules"]:
        for ab in "AB":
            assert torch.equal(file[f"base_model.model.{module}.lora_{ab}.weight"], want[f"{module}.lora_{ab}"])


@pytest.mark.parametrize("layout", [shape(pp=2), shape(shard=2)], ids=["pp2", "shard 2"])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path, layout: list[str]) -> None:
    more = [LORA, "schedule=constant", *layout]
    run(tmp_path / "run", *more, steps=2)
    run(tmp_path / "run", *more, steps=4)
    run(tmp_path / "at once", *more, steps=4)
    assert tensors(tmp_path / "run", 4) == tensors(tmp_path / "at once", 4)
    assert losses(tmp_path / "run") == losses(tmp_path / "at once")


def test_another_alpha_is_another_model_and_a_tied_weight_is_not_merged(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, f"run_dir={tmp_path}/run", *shape(), "schedule=constant"]
    resume = f"checkpoint.resume={tuned}/checkpoints/step-000006"
    assert main([*words, LORA.replace("8", "4"), resume, "train.steps=8"]) == 2
    assert "the weights would continue in another model" in capsys.readouterr().err
    head = "model.lora={rank: 4, alpha: 8, modules: head}"
    assert main([*words, head, "steps=[train,save,export]", "train.steps=1"]) == 2
    told = "steps.export.lora = merged: head.weight shares its tensor with embed.weight, which would change too"
    assert told in (err := capsys.readouterr().err)
    assert "try:    steps.export.lora=separate" in err


def test_a_tied_weight_of_a_finished_run_is_not_merged_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedding would get the head's adapter too: another model than the one that was trained."""
    head = "model.lora={rank: 4, alpha: 8, modules: head}"
    words = [*TINY, f"run_dir={tmp_path}/run", *shape(), "train.steps=1", head]
    assert main([*words, "steps=[train,save]"]) == 0
    checkpoint = tmp_path / "run/checkpoints/step-000001"
    for named in ([], [f"steps.export.src={checkpoint}"]):
        assert main([*words, "steps=[export]", *named]) == 2
        assert "merged: head.weight shares its tensor with embed.weight" in capsys.readouterr().err
    assert main([*words, "steps=[export]", "steps.export.lora=separate"]) == 0


def test_an_adapter_that_no_forward_calls_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = "model={_target_: tests.run.own.Bypassed, vocab: 64, dim: 16, lora: {rank: 2, alpha: 2, modules: '*'}}"
    assert main([*TINY[2:], own, "security.allow=[tests]", f"run_dir={tmp_path}/run", *shape(), "train.steps=1"]) == 2
    told = (
        "model.lora.modules: inner: the forward never calls it, so an adapter would "
        "have no effect; remove it from the list"
    )
    assert told in capsys.readouterr().err.replace(" = ", ": ")


def test_operators_over_tp_train_adapters_and_export_them(base: Path, tmp_path: Path) -> None:
    steps = ("steps=[load,train,evaluate,save,export]", f"steps.load.path={base}/checkpoints/step-000003")
    more = (*steps, "steps.evaluate.batches=1", "schedule=constant", "optim.lr=0.01", LORA)
    sizes = ("parallel.grid.tp=2", "launch.nproc=4", "parallel.pipeline.stages=2", "parallel.hsdp=null")
    for name, words in (("one", shape()), ("tp", ("operators=megatron", *sizes))):
        run(tmp_path / name, *more, *words, steps=6)
    assert losses(tmp_path / "tp") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, tp = (load_file(tmp_path / name / "exports/model.safetensors") for name in ("one", "tp"))
    for name, t in one.items():
        torch.testing.assert_close(tp[name], t, rtol=1e-4, atol=1e-6)
    assert not torch.equal(one["layers.0.attn.q.weight"], weights_of_checkpoint(base, 3)["layers.0.attn.q.weight"])


def test_adapters_of_a_class_of_the_users_own_are_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = "model={_target_: tests.run.own.OwnAdapters, vocab: 64, dim: 16}"
    words = ["parallel.operators={inner: {weight: [tp, null]}}", "parallel.grid.tp=2", "launch.nproc=2"]
    none = ["parallel.pipeline.stages=1", "parallel.hsdp=null", "security.allow=[tests]", "train.steps=1"]
    assert main([*TINY[2:], own, f"run_dir={tmp_path}/run", *words, *none]) == 2
    told = "weight is cut over tp, but only input and output of a linear with adapters of its own can be cut"
    assert told in capsys.readouterr().err


def test_settings_of_an_export_that_say_nothing_of_adapters_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, f"run_dir={tmp_path}/run", *shape(), "train.steps=1", "steps=[train,save,export]"]
    separate = "steps.export.lora=separate"
    assert main([*words, separate]) == 2
    told = "steps.export.lora = separate: model.lora is null, so there are no adapters\n"
    assert told in capsys.readouterr().err
    assert main([*words, separate, LORA, "steps.export.names=llama"]) == 2
    told = "separate adapters are written as PEFT's two files, with this model's names; remove this key"
    assert f"steps.export.names = llama: {told}\n" in capsys.readouterr().err
