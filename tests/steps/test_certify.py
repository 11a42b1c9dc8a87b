"""The certificate holds for correct training, and names what is wrong in faulty training."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch

from launcher.__main__ import main
from launcher.job.schema.steps import Certify
from launcher.parallel import tied_parameters
from launcher.steps.certification.certificate import PARTS, Certificate, Finding, _row, verdict
from launcher.steps.certification.compare import _far
from tests.run import llama
from tests.run.launching import TINY, run
from tests.steps.certified import ALL, REPLICAS, SHARDED, TWO, certificate, of
from tests.test_parity_tp import MEGATRON
from tests.tiers import exhaustive, some
from tests.tracing import TRACING

GROUPS = {
    "adamw": {"name": "adamw", "groups": {
        "*norm": {"weight_decay": 0.5, "lr": 0.01}, "embed": {"lr": 1e-4, "betas": [0.5, 0.9]},
        "layers.0.attn.*": {"eps": 1e-3}, "layers.*": {"lr": 0.002}, "layers": {1: {"mlp": {"up": {"lr": 0.0}}}},
    }},
    "lion": {"name": "lion", "groups": {"head": {"betas": [0.5, 0.9]}, "*norm": {"lr": 0.01, "weight_decay": 1}}},
    "adafactor": {"name": "adafactor", "groups": {"*norm": {"weight_decay": 0.1}, "layers.*.attn.*": {"d": 2.0}}},
    "muon": {"name": "muon", "groups": {
        "*norm": {"betas": [0.5, 0.9], "weight_decay": 1}, "embed": {"use": "muon"}, "layers.0": {"momentum": 0.5},
        "layers.1.mlp.up": {"use": "adamw", "lr": 0.01, "eps": 1e-3},
    }},
    "sgd": {"name": "sgd", "groups": {"*norm": {"momentum": 0.9}, "*.attn.[qk]": {"weight_decay": 0.5}}},
}  # fmt: skip
OVER_TP = {"operators": MEGATRON, "grid": {"tp": 2}}


@pytest.mark.parametrize(("optim", "layout"), [
    ("adamw", "all axes"), ("lion", "all axes"), ("sgd", "level3"), ("lion", "tp"), ("adamw", "tp"),
    ("adafactor", "all axes"), ("muon", "all axes"), ("adafactor", "tp"), ("muon", "tp"),
])  # fmt: skip
def test_groups_of_parameters_are_certified(optim: str, layout: str) -> None:
    parallel = {"all axes": ALL, "tp": OVER_TP, "level3": SHARDED}[layout]
    c = certificate(parallel, model__layers=2, optim=GROUPS[optim])
    assert c.holds, c.verdict()


def test_a_layout_of_everything_is_certified_and_every_part_was_compared() -> None:
    c = certificate(ALL, model__layers=2)
    assert c.holds, c.verdict()
    assert {f.part for f in c.findings} == set(PARTS) - {"average", "buffer", "statistics"}
    grads = [f.name for f in c.findings if f.part == "gradient"]
    assert len(grads) == 4 * len(set(grads)) == 4 * 20
    assert [f.step for f in c.findings if f.part == "validation"] == [4]
    assert {f.step for f in c.findings if f.part == "loaded"} == {3}
    assert re.fullmatch(
        r"holds: 20 parameters, \d+ comparisons, largest error \d\.\de[+-]\d\d, allowed 1e-12; "
        r"\d+ errors up to \d\.\de[+-]\d\d are relative to roundings of the gradient norm \(\d\.\de[+-]\d\d\)",
        c.verdict(),
    )


EMA = {"decay": 0.75, "every": 2}
TIED = {"pipeline": {"stages": 2, "micro_batch_num": 2, "interleave": True}}  # both copies of a tie on one rank


@pytest.mark.parametrize(("parallel", "changes"), [
    (ALL, {}), (SHARDED, {}), ({"hsdp": {**SHARDED["hsdp"], "optimizer_level": "level2"}}, {}), (OVER_TP, {}),
    (TIED, {"model__layers": 4}), (SHARDED, of("Frozen")), (ALL, {"train__precision": "bf16"}),
], ids=["all axes", "level3", "level2", "tp", "two copies on a rank", "frozen weights", "bf16"])  # fmt: skip
def test_the_moving_average_of_weights_is_certified(parallel: dict[str, Any], changes: dict[str, Any]) -> None:
    c = certificate(parallel, **{"model__layers": 2, "train__ema": EMA, **changes})
    assert c.holds, c.verdict()
    means = {f.name for f in c.findings if f.part == "average"}
    assert means == {f.name for f in c.findings if f.part == "gradient"}
    assert {f.step for f in c.findings if f.part == "average"} == {1, 2, 3, 4}
    assert [f.name for f in c.findings if f.part == "validation"] == ["", "the moving average"]


LORA = {"rank": 4, "alpha": 6, "modules": ["layers.1.attn", "layers.1.mlp.u*"]}


@pytest.mark.parametrize(("layout", "changes"), [
    ("all axes", {"train__clip_norm": 0.05}), ("level3", {"optim": {"name": "muon"}}),
    ("level3", {"optim": {"name": "lion"}}), ("level2", {"optim": {"name": "adafactor"}}),
    ("all axes", {"train__precision": "bf16"}),
], ids=["pp2 x replicate 2 x shard 2", "level3, muon", "level3, lion", "level2, adafactor", "bf16"])  # fmt: skip
def test_adapters_beside_frozen_weights_are_certified_where_a_stage_has_none(
    layout: str, changes: dict[str, Any]
) -> None:
    level2 = {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": "level2"}}
    parallel = {"all axes": ALL, "level3": SHARDED, "level2": level2}[layout]
    c = certificate(parallel, **({"model__layers": 2, "model__lora": LORA} | changes))
    assert c.holds, c.verdict()
    assert {f.name for f in c.findings if f.part == "gradient"} == {
        f"layers.1.{m}.lora_{ab}" for m in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up") for ab in "AB"
    }


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_gradients_that_are_nothing_but_roundings_are_no_error(precision: str) -> None:
    """All positions are equal, so queries do not change the attention.

    Their gradients are rounding errors, which differ by the order of sums.
    """
    lora = {"rank": 2, "alpha": 4, "modules": "layers.*.attn.q"}
    layout = {"pipeline": {"stages": 2, "micro_batch_num": 4}}
    c = certificate(layout, Certify(precision=precision), model__layers=2, model__dim=32, model__lora=lora)
    assert c.holds, c.verdict()


FINE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a counter in the environment": (TWO, of("Counted", net_how="environment")),
    "a counter in a variable of its file": (TWO, of("Counted", net_how="variable")),
    "a counter on a library's module": (TWO, of("Counted", net_how="library")),
    "running statistics": (TWO, of("Normed")),
    "running statistics of each sample": (TWO, of("InstanceNormed")),
    "statistics of each micro batch alone": (TWO, of("NotTracked")),
    "an average that is only kept": (TWO, of("Averaged", net_used=False)),
    "an average that is used": ({"pipeline": {"micro_batch_num": 4}}, of("Averaged", net_used=True)),
    "a buffer that is drawn and not kept": (TWO, of("Drawn")),
    "frozen weights": (SHARDED, of("Frozen")),
    "a way that depends on data": (SHARDED, of("Looking")),
    "experts, all replicas whole": (TWO, of("Routed")),
    "part of it in bf16": (TWO, of("Autocast", train__precision="fp32")),
    "gradients that overflow fp16 at most scales": (TWO, of("Loud", train__precision="fp16")),
    "a model that cannot be copied": (TWO, of("Uncopied")),
    "an optimizer of the user's own": (SHARDED, of("Net", optim={"_target_": "tests.steps.nets.Lion"})),
    "a schedule of the user's own": (TWO, of("Net", schedule={"_target_": "tests.optim.own_schedules.InverseRoot"})),
    "a decay": (TWO, of("Net", schedule={"name": "wsd", "warmup_steps": 1})),
    "restarts": (TWO, of("Net", schedule={"name": "cosine_restarts", "period_steps": 4})),
    "nothing to clip at": (TWO, of("Net", train__clip_norm=None)),
    "three samples of a replica": (TWO, of("Net", train__batch_size=12)),
}  # fmt: skip


@pytest.mark.parametrize("case", some(FINE))
def test_unusual_but_correct_layouts_are_certified(case: str) -> None:
    parallel, changes = FINE[case]
    own = changes.get("train__precision", "fp64")
    c = certificate(parallel, Certify(precision=own), **changes)
    assert c.holds, c.verdict()


def test_running_statistics_are_certified_over_stages_too() -> None:
    resnet = {"name": "resnet", "depth": 18, "width": 4, "channels": 1}
    c = certificate(REPLICAS, model=resnet, data={"name": "mnist5k"}, optim={"name": "momentum"})
    assert c.holds, c.verdict()
    assert any(f.part == "buffer" for f in c.findings)


def test_sums_in_place_of_means_are_certified_as_such() -> None:
    c = certificate(REPLICAS | {"gradients_mean": False, "pipeline": {"stages": 2, "loss_reduction": "sum"}})
    assert c.holds, c.verdict()


HALF: dict[str, tuple[str, dict[str, Any], float]] = {
    "bf16, nothing rounds in another order": ("bf16", {"grid": {"dp_replicate": 2}}, 1e-6),
    "fp16, two stages that share a table": ("fp16", {"pipeline": {"stages": 2}}, 8 * 2.0**-11),
}


@pytest.mark.parametrize(("precision", "parallel", "allowed"), list(HALF.values()), ids=list(HALF))
def test_half_precision_is_certified_against_one_process_in_the_same(precision, parallel, allowed):
    c = certificate(parallel, Certify(precision=precision), model__layers=2)
    assert c.holds, c.verdict()
    assert c.tolerance == allowed
    assert max(f.error for f in c.findings if f.part == "update") <= 1e-6


COMPILED: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "stages, shards and replicas": ("aot_eager", "fp64", ALL, 1e-12),
    "operators over tp": ("aot_eager", "fp64", {"grid": {"tp": 2}, "operators": MEGATRON}, 1e-12),
    "fp16, where kernels leave out roundings": ("inductor", "fp16", {}, 8 * 2.0**-11),
}


@pytest.mark.filterwarnings(*TRACING)
@exhaustive
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_blocks_are_certified_against_eager_code(case, tmp_path, monkeypatch):
    backend, precision, parallel, allowed = COMPILED[case]
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor compiles C++ for the CPU: there is no g++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    how = {"backend": backend}
    c = certificate(parallel, Certify(precision=precision), model__layers=2, train__compile=how)
    assert c.holds, c.verdict()
    assert c.tolerance == allowed


CERTIFY = ("steps=[certify]", "model.layers=3", "train.batch_size=16")


def test_the_step_writes_a_certificate_with_all_that_is_needed_to_make_it_again(tmp_path, capfd):
    folder = run(tmp_path / "run", *CERTIFY)
    said = json.loads((folder / "certificate.json").read_text())
    assert said["holds"]
    assert said["copy"] == {
        "model.layers": "3 -> 2", "train.steps": "4 -> 5", "train.precision": "fp32 -> fp64",
        "schedule.warmup_steps": "20 -> 2", "train.batch_size": "16 -> 8",
    }  # fmt: skip
    assert (said["precision"], said["tolerance"]) == ("fp64", 1e-12)
    own = said["own"]
    assert (own["precision"], own["tolerance"], own["wrong"]) == ("fp32", 1e-6, [])
    assert own["copy"] == {"model.layers": "3 -> 2", "schedule.warmup_steps": "20 -> 2", "train.batch_size": "16 -> 8",
                           "train.steps": "4 -> 5"}  # fmt: skip
    assert len(own["errors"]) == len(said["errors"])
    assert said["settings"]["pipeline"] == {"stages": 2, "micro_batch_num": 2}
    assert (said["layout"]["pp"], said["layout"]["dp_shard"], said["layout"]["tied"]) == (2, 2, ["embed.weight"])
    assert said["versions"]["torch"] == version("torch")
    assert re.search(r"certify: holds: \d+ parameters, \d+ comparisons, largest error \d\.\de", capfd.readouterr().out)
    assert [p.name for p in (*folder.glob("checkpoints/*"), *folder.glob("certify"))] == []


def test_an_import_is_certified_without_its_weights_and_its_tokenizer(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # the weights and the tokenizer are not here
    sizes = (f"model.{key}={n}" for key, n in llama.SIZES.items())
    words = ("recipe=smollm2_pp2_tp2", "steps=[certify]", "data.vocab_size=270", "data.seq_len=16", *sizes)
    assert main([*words, "run_dir=run"]) == 0, capfd.readouterr().err
    said = json.loads((tmp_path / "run/certificate.json").read_text())
    assert (said["holds"], said["copy"]["data"]) == (True, "text -> random_tokens")


def test_a_run_whose_certificate_does_not_hold_ends_with_1_and_names_the_parameter(tmp_path, monkeypatch, capfd):
    real = tied_parameters.Tied.reduce
    monkeypatch.setattr(tied_parameters.Tied, "reduce", lambda self: (real(self), real(self)))
    folder = tmp_path / "run"
    assert main([*TINY, f"run_dir={folder}", "train.steps=1", *CERTIFY, "steps=[certify,train]"]) == 1
    told = "step 1: the gradient of embed.weight: error 1.0e+00 against one process"
    line = r"error: rank \d: the certificate (does not hold .*); all errors are in (.*)\n"
    found = re.match(line, capfd.readouterr().err)
    assert found
    more = len(json.loads((folder / "certificate.json").read_text())["wrong"]) - 1
    assert found[1] == f"does not hold (allowed 1e-12): {told} (and {more} more)"
    assert found[2] == str(folder / "certificate.json")
    said = json.loads((folder / "certificate.json").read_text())
    assert (said["holds"], said["wrong"][0]) == (False, told)
    assert not (folder / "metrics.jsonl").read_text()


def test_targets_with_holes_are_certified() -> None:
    c = certificate(
        ALL,
        model__layers=2,
        data={"_target_": "tests.parallel.sources.Holed", "seq_len": 8},
        security__allow=("tests",),
    )
    assert c.holds, c.verdict()


def test_a_certificate_says_where_an_error_is_relative_to_roundings_of_the_norm():
    """An error is relative to the rounding of the norm if the gradient is smaller than that, else to the gradient."""
    want = torch.tensor([1e-9, -2e-9], dtype=torch.float64)
    found = [_far(4, "gradient", "b", want * 2, want=want, rounding=floor) for floor in (1e-3, 1e-10, 0.0)]
    assert [(f.error, f.relative_to) for f in found] == [(pytest.approx(2e-6), 1e-3), (1.0, 0.0), (1.0, 0.0)]
    assert ["relative_to" in _row(f) for f in found] == [True, False, False]


OWN = Finding(1, "gradient", "w", 2e-15)
ROUNDED = Finding(1, "gradient", "b", 3e-14, relative_to=2.2e-4)


@pytest.mark.parametrize(
    ("rounded", "told"),
    [
        ([], ""),
        ([0.0], ""),
        ([3e-14], "; 1 error of 3.0e-14 is relative to roundings of the gradient norm (2.2e-04)"),
        ([1e-14, 3e-14], "; 2 errors up to 3.0e-14 are relative to roundings of the gradient norm (2.2e-04)"),
    ],
    ids=["none", "one of 0", "one", "two"],
)
def test_the_verdict_says_which_error_is_not_relative_to_a_tensors_own_numbers(rounded, told):
    """The largest error is that of the other comparisons, also in the second precision."""
    c = Certificate((OWN, *(replace(ROUNDED, error=e) for e in rounded)), 1e-12, "fp64")
    parameters = 2 if rounded else 1
    line = f"{parameters} parameters, {len(rounded) + 1} comparisons, largest error 2.0e-15, allowed 1e-12{told}"
    assert c.verdict() == f"holds: {line}"
    assert verdict([c, c]) == f"holds: {line}; in fp64 largest error 2.0e-15, allowed 1e-12{told}"


def test_an_error_that_is_too_large_says_what_it_is_relative_to():
    wrong = Certificate((replace(OWN, error=0.5), replace(ROUNDED, error=0.25, step=2)), 1e-12, "fp64").wrong
    assert [str(f) for f in wrong] == [
        "step 1: the gradient of w: error 5.0e-01 against one process",
        "step 2: the gradient of b: error 2.5e-01 against one process, relative to roundings of the gradient norm "
        "(2.2e-04)",
    ]
