"""A model that returns a tuple or a dict of tensors, which a loss of the user's own takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.__main__ import main
from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.deferred_init import fill
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import loop
from launcher.steps.certification.gather_full import Piece, error, pieces
from launcher.steps.model import build_session, single_process
from tests.parallel.sources import Holed
from tests.parity import job, plain, whole
from tests.ranks import DRAWN, on_ranks
from tests.tiers import some

OWN = "tests.objective.structured"
SHARD: dict[str, Any] = {"shard_size": 2, "threshold": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp2": {"pipeline": {"stages": 2, "micro_batch_num": 4}},
    "level1": {"hsdp": SHARD},
    "level2 x pp2": {"pipeline": {"stages": 2}, "hsdp": SHARD | {"optimizer_level": "level2"}},
    "level3": {"pipeline": {"micro_batch_num": 2}, "hsdp": SHARD | {"optimizer_level": "level3"}},
    "interleaved": {"pipeline": {"stages": 2, "interleave": True, "micro_batch_num": 4}},
    "zero bubble": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_h1", "micro_batch_num": 4}},
    "zero bubble v": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v", "micro_batch_num": 4}},
}
KINDS = ("tuple", "dict", "list")
STEPS = 3


def asked(kind: str, parallel: Mapping[str, Any], **changes: Any) -> Job:
    return job(**{
        "parallel": parallel, "model": {"_target_": f"{OWN}.Heads", "kind": kind},
        "data": {"_target_": "tests.parallel.sources.Holed", "seq_len": 8}, "loss": {"_target_": f"{OWN}.Both"},
        "metrics": [{"_target_": f"{OWN}.Far"}], "security__allow": ("tests",), "optim": {"name": "sgd", "lr": 0.5},
        "train__steps": STEPS, **changes,
    })  # fmt: skip


def rank_trains(world: World, cells: Mapping[str, tuple[Job, Plan]], folder: Path) -> dict[str, Any]:
    out = {}
    for kind, (j, plan) in cells.items():
        s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
        losses = []
        for step in range(STEPS):
            losses.append(loop.step(s, 1.0, measuring=step == STEPS - 1)[0])
            s.step = step + 1
        loop.validate(s, None)
        out[kind] = losses, s.results["val_loss"], s.results["val_far"], pieces(s.model, weights=True)
    return out


def mean(output: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the metric of a whole batch, written out."""
    logits, value = (output["logits"], output["value"]) if isinstance(output, dict) else output
    counts = y != -100
    chosen = torch.log_softmax(logits[counts], -1)[torch.arange(int(counts.sum())), y[counts]]
    off = value[counts] - y[counts] / 64
    return (-chosen + 0.3 * off**2).mean(), off.abs().mean()


def alone(j: Job, plan: Plan) -> tuple[list[float], nn.Module]:
    holed = Holed(8, "train")
    model = plain(j, plan)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, _ = mean(model(holed.tokens), holed.following)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("layout", some(LAYOUTS, one_in=2))
def test_it_trains_as_plain_torch_does(layout: str, tmp_path: Path) -> None:
    jobs = {kind: asked(kind, LAYOUTS[layout]) for kind in KINDS}
    cells = {kind: (j, plan_job(j)) for kind, j in jobs.items()}
    ranks = on_ranks(next(plan.sizes.grid.size for _, plan in cells.values()), rank_trains, cells, tmp_path)
    held = Holed(8, "val")
    for kind, (j, plan) in cells.items():
        losses, after = alone(j, plan)
        with torch.no_grad():
            want = [t.item() for t in mean(after(held.tokens), held.following)]
        got: list[Piece] = []
        for found, loss, far, mine in (r[kind] for r in ranks):
            assert found == pytest.approx(losses, rel=1e-12)
            assert [loss, far] == pytest.approx(want, rel=1e-12)
            got += mine
        off = {n: error(t, fill.tensors(after)[n].detach()) for n, t in whole(plan, got).items()}
        assert {n: e for n, e in off.items() if not e <= 1e-12} == {}
        assert single_process.held_out(after, j, None)["loss"] == pytest.approx(want[0], rel=1e-12)


def test_the_plan_says_what_there_is() -> None:
    plan = plan_job(asked("dict", LAYOUTS["pp2"]))
    assert plan.output_keys == ("value", "logits")
    assert [t.shape for t in plan.output] == [(2, 8), (2, 8, 64)]
    assert plan_job(asked("tuple", {})).output_keys == (0, 1)


RETURNS = "and the model returns a dict of value, logits"
ALONE = "return the logits alone, those of a dict or an object by their name, as in out.logits"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "loss": (
        {"loss": {"name": "cross_entropy"}, "metrics": []},
        "model: its forward returns a dict of value, logits, and loss=cross_entropy takes one tensor; "
        f"{ALONE}, or give a loss of your own by loss._target_",
    ),
    "metric": ({"metrics": ["accuracy"]}, f"metrics: accuracy: of one tensor, {RETURNS}"),
    "predict": ({"steps": {"predict": {"kind": "predict"}}}, f"steps.predict: it takes one tensor, {RETURNS}"),
    "broadcast": (
        {"parallel": {"pipeline": {"stages": 2, "output_broadcast": True}}},
        f"parallel.pipeline.output_broadcast: true: one tensor reaches every stage, {RETURNS} "
        "(try: parallel.pipeline.output_broadcast=false)",
    ),
    "pieces": (
        {"parallel": {"pipeline": {"stages": 2, "seq_chunks": 2, "scheduler": "seqpipe"}}},
        f"parallel.pipeline.seq_chunks: 2: pieces of a sequence are put together as one tensor, {RETURNS} "
        "(try: parallel.pipeline.seq_chunks=1 parallel.pipeline.scheduler=1f1b)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_takes_one_tensor_is_refused(kind: str) -> None:
    changes, said = REFUSED[kind]
    with pytest.raises(RequestError) as refused:
        plan_job(asked("dict", changes.pop("parallel", {}), **changes))
    assert said in str(refused.value)


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(asked("tuple", {}, model={"_target_": f"{OWN}.Odd", "kind": "tuple"}))
    assert str(refused.value) == (
        "model: its forward returns something that is no tensor, nor a tuple or dict of tensors; "
        "return the logits alone, those of an object by their name, as in out.logits"
    )


def test_it_is_certified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "recipe=null", "model=null", f"model._target_={OWN}.Heads", "model.kind=dict", "data=null",
        "data._target_=tests.parallel.sources.Holed", "data.seq_len=8", "loss=null", f"loss._target_={OWN}.Both",
        "security.allow=[tests]", "train.steps=3", "train.batch_size=8", "launch.nproc=4", "name=heads",
        "parallel.pipeline.stages=2", "parallel.hsdp={shard_size: 2, threshold: 0}", "steps=[certify]",
        f"run_dir={tmp_path}/run", "logger=plain",
    ]  # fmt: skip
    assert main(words) == 0, capsys.readouterr().err
    assert "certify: holds: " in capsys.readouterr().out
