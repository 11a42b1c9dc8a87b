"""The certificate holds for what is right, and names what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.__main__ import main
from launcher.decide import plan_job
from launcher.job.steps import Certify
from launcher.parallel import fuse, init, live, norm, tie
from launcher.plan.reduced import reduced
from launcher.runtime import pipeline
from launcher.runtime.world import World
from launcher.steps.certificate import Certificate
from launcher.steps.certify import examine
from tests.parity import job
from tests.ranks import on_ranks
from tests.run import llama
from tests.run.launching import TINY, run

HERE = Path()
ALL: dict[str, Any] = {
    "pipeline": {"stages": 2, "micro_batch_num": 2}, "hsdp": {"shard_size": 2, "threshold": 0},
    "grid": {"dp_replicate": 2},
}  # fmt: skip
REPLICAS: dict[str, Any] = {"pipeline": {"stages": 2}, "grid": {"dp_replicate": 2}}


def certificate(parallel: dict[str, Any], step: Certify | None = None, **changes: Any) -> Certificate:
    """Of a small job, on real ranks."""
    asked = job(parallel=parallel, **changes)
    copy = reduced(asked, step or Certify(), plan_job(asked).sizes)
    plan = plan_job(copy.job)

    def work(world: World) -> Certificate | None:
        return examine(world, copy.job, plan, copy.tolerance, HERE)

    found = on_ranks(plan.sizes.grid.size, work)[0]
    assert found is not None
    return found


def test_a_layout_of_everything_is_certified_and_every_part_was_compared() -> None:
    c = certificate(ALL, model__layers=2)
    assert c.holds, c.verdict()
    assert {f.part for f in c.findings} == {"weights", "loss", "norm", "gradient", "update", "samples"}
    grads = [f.name for f in c.findings if f.part == "gradient"]
    assert len(grads) == 2 * len(set(grads)) == 2 * 20
    assert re.fullmatch(
        r"holds: 20 parameters, \d+ comparisons, largest error \d\.\de[+-]\d\d, allowed 1e-12", c.verdict()
    )


def test_running_statistics_are_certified_too() -> None:
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


def scaled(patch: pytest.MonkeyPatch) -> None:
    real = pipeline.Pipeline.__init__

    def wrong(self: Any, model: Any, *args: Any) -> None:
        real(self, model, *args)
        self.scale *= model.plan.sizes.micros

    patch.setattr(pipeline.Pipeline, "__init__", wrong)


def counted_per_replica(patch: pytest.MonkeyPatch) -> None:
    real = norm.build

    def wrong(model: Any) -> norm.Norm:
        replicas = model.plan.sizes.grid["dp_replicate"]
        good = real(model)
        return norm.Norm(tuple((t, w * replicas) for t, w in good.pieces), good.copies)

    patch.setattr(norm, "build", wrong)


def initialised_differently(patch: pytest.MonkeyPatch) -> None:
    real = init.fill

    def wrong(parts: Any, plan: Any, rank: int, device: Any, whole: Any) -> None:
        at = plan.sizes.grid.coords(rank)["dp_replicate"]
        real(parts, plan, rank, device, lambda name: whole(name) * (1 + at))

    patch.setattr(live, "fill", wrong)


def added_twice(patch: pytest.MonkeyPatch) -> None:
    real = tie.Tied.reduce

    def wrong(self: Any) -> None:
        real(self)
        real(self)

    patch.setattr(tie.Tied, "reduce", wrong)


def last_skipped(patch: pytest.MonkeyPatch) -> None:
    def wrong(part: Any, plan: Any, meshes: Any) -> list[fuse.Bucketed]:
        return [fuse.Bucketed(b.tensors[:-1], b.group) for b in fuse.fuse(part, plan, meshes)]

    patch.setattr(live, "fuse", wrong)


MUTATIONS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "pipeline gradients scaled by the number of micro batches": (
        scaled, ALL, r"step 1: the gradient of \S+: 1\.0e\+00 from one process \(and",
    ),
    "a norm that counts every replica": (
        counted_per_replica, ALL, r"step 1: the global gradient norm: 4\.1e-01 from one process \(and 1 more\)$",
    ),
    "replicas initialised differently": (
        initialised_differently, ALL, r"the weights at step 0 of embed\.weight: copies differ on ranks 0 and 2 \(and",
    ),
    "a tied gradient added twice": (
        added_twice, ALL, r"step 1: the gradient of embed\.weight: 1\.0e\+00 from one process \(and",
    ),
    "a bucket that skips its last parameter": (
        last_skipped, REPLICAS, r"step 1: the gradient of layers\.0\.mlp\.down\.weight: copies differ on ranks 0 and 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("break_it", "parallel", "said"), list(MUTATIONS.values()), ids=list(MUTATIONS))
def test_a_bug_that_other_trainers_shipped_is_caught(
    monkeypatch: pytest.MonkeyPatch, break_it: Any, parallel: dict[str, Any], said: str
) -> None:
    break_it(monkeypatch)
    c = certificate(parallel, model__layers=2)
    assert not c.holds
    assert re.match(r"does not hold \(allowed 1e-12\): " + said, c.verdict()), c.verdict()


CERTIFY = ("steps=[certify]", "model.layers=3", "train.batch_size=16")


def test_the_step_writes_a_certificate_with_all_that_is_needed_to_make_it_again(tmp_path, capfd):
    folder = run(tmp_path / "run", *CERTIFY)
    said = json.loads((folder / "certificate.json").read_text())
    assert said["holds"]
    assert said["copy"] == {
        "model.layers": "3 -> 2", "train.steps": "4 -> 2", "train.precision": "fp32 -> fp64",
    }  # fmt: skip
    assert said["settings"]["pipeline"] == {"stages": 2, "micro_batch_num": 4}
    assert (said["layout"]["pp"], said["layout"]["dp_shard"], said["layout"]["tied"]) == (2, 2, ["embed.weight"])
    assert said["versions"]["torch"] == torch.__version__
    assert re.search(r"certify: holds: \d+ parameters, \d+ comparisons, largest error \d\.\de", capfd.readouterr().out)
    assert [p.name for p in folder.glob("checkpoints/*")] == []


def test_an_import_is_certified_without_its_weights_and_its_tokenizer(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # where there are neither
    sizes = (f"model.{key}={n}" for key, n in llama.SIZES.items())
    words = ("recipe=smollm2_pp2_tp2", "steps=[certify]", "data.vocab_size=270", "data.seq_len=16", *sizes)
    assert main([*words, "run_dir=run"]) == 0, capfd.readouterr().err
    said = json.loads((tmp_path / "run/certificate.json").read_text())
    assert (said["holds"], said["copy"]["data"]) == (True, "text -> random_tokens")


def test_a_run_whose_certificate_does_not_hold_ends_with_1_and_names_the_parameter(tmp_path, monkeypatch, capfd):
    added_twice(monkeypatch)
    folder = tmp_path / "run"
    assert main([*TINY, f"run_dir={folder}", "train.steps=1", *CERTIFY, "steps=[certify,train]"]) == 1
    told = "step 1: the gradient of embed.weight: 1.0e+00 from one process"
    line = r"error: rank \d: the certificate (does not hold .*); all errors are in (.*)\n"
    found = re.match(line, capfd.readouterr().err)
    assert found
    assert found[1] == f"does not hold (allowed 1e-12): {told} (and 22 more)"
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
