"""Law 9 in one layout: after a resume, everything that changes from step to step is as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import checkpoint_tensors, loop, module_state, save
from launcher.runtime.training.session import Session
from launcher.steps import train
from launcher.steps.model import build_session
from tests.ranks import DRAWN, on_ranks
from tests.run.launching import TINY

MOVES = ("step", "loss", "lr", "grad_norm", "loss_scale")


def left(s: Session) -> dict[str, Any]:
    """Return the weights and everything else that a rank keeps."""
    saved = checkpoint_tensors.tensors(s, checkpoint_tensors.states(s))
    return {**{n: t.clone() for n, t in saved.items()}, "streams": torch.get_rng_state(),
            "scaling": (s.scaling.factor, s.scaling.good) if s.scaling.dynamic else None}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def stopped_and_not(world: World, j: Job, plan: Plan, folder: Path) -> tuple[list[str], list[Any], list[Any]]:
    """Compare a run of four steps with one that resumes after two.

    Returns what differs at the end, and the rows of both.
    """
    rows: list[list[Any]] = [[], []]
    straight = build_session.build(replace(world, send=rows[0].append), j, plan, folder, drawn=DRAWN)
    if straight.scaling.dynamic:
        straight.scaling.factor, straight.scaling.good = 1024.0, 1997  # the factor doubles after 2000, in step 3
    loop.train(straight, train.loop_settings(straight, j))
    want = left(straight)
    again = build_session.build(replace(world, send=rows[1].append), j, plan, folder, drawn=DRAWN)
    checkpoint_tensors.load(again, folder / "checkpoints/step-000002")
    loop.train(again, train.loop_settings(again, j))
    got = left(again)
    assert got.keys() == want.keys()
    moved = [[{k: row.get(k) for k in MOVES} for row in told if "loss" in row] for told in rows]
    return [n for n in want if not same(want[n], got[n])], moved[0][2:], moved[1]


def test_weights_optimizer_schedule_scaler_samples_and_streams_go_on_bit_for_bit(tmp_path):
    j = compose([
        *TINY[2:], "model={_target_: tests.run.own.Dropped, vocab: 64, dim: 16}", "security.allow=[tests]",
        "parallel.pipeline.stage_config={embed: 0, drop: 0, head: 1}", "train.precision=fp16",
        "schedule=cosine", "checkpoint.every=2", "checkpoint.keep=null", "train.steps=4",
    ]).job  # fmt: skip
    plan = plan_job(j)
    assert [n for _, n in plan.sizes.grid.axes if n > 1] == [2, 2]
    found = on_ranks(4, stopped_and_not, j, plan, tmp_path)
    for different, want, got in found:
        assert different == []
        assert got == want
    told = found[0][1]
    assert [row["loss_scale"] for row in told] == [2048.0, 2048.0]
    assert told[0]["lr"] != told[1]["lr"]


def stateful(draws: bool, *more: str) -> Job:
    model = f"model={{_target_: tests.steps.stateful_nets.Net, draws: {str(draws).lower()}}}"
    same = ["data=random_tokens", "data.vocab_size=64", "data.seq_len=8", "train.batch_size=8", "train.precision=fp64"]
    return compose([
        model, "security.allow=[tests]", *same, "optim=sgd", "schedule=constant",
        "steps=[train,save]", "parallel.hsdp=null",
        "checkpoint.every=2", "checkpoint.keep=null", "train.steps=4", *more,
    ]).job  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "job"),
    [
        (1, stateful(True, "launch.nproc=1", "parallel.pipeline.stages=1")),
        (2, stateful(False, "launch.nproc=2", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batch_num=2")),
        (2, stateful(False, "launch.nproc=2", "parallel.pipeline.stages=1", "parallel.grid.dp_replicate=2")),
    ],
    ids=["one rank that draws", "stages", "replicas"],
)
def test_extra_state_and_python_and_numpy_streams_resume_bit_for_bit(tmp_path, ranks, job):
    for different, want, got in on_ranks(ranks, stopped_and_not, job, plan_job(job), tmp_path):
        assert different == []
        assert got == want


def moved(world: World, before: tuple[Job, Plan], after: tuple[Job, Plan], folder: Path) -> list[Any]:
    """Return the state of modules where it was saved, and in another layout after a load."""
    told = []
    for j, plan in (before, after):
        s = build_session.build(replace(world, send=[].append), j, plan, folder, drawn=DRAWN)
        if told:
            checkpoint_tensors.load(s, folder / "checkpoints/step-000004")
        else:
            loop.train(s, train.loop_settings(s, j))
            save.save(s, None)
        every = [None] * world.size
        torch.distributed.all_gather_object(every, module_state.extra_state_text(s.model))
        told.append(next(t for t in every if t != "{}"))
    return told


def test_extra_state_of_modules_is_restored_in_another_layout(tmp_path):
    jobs = [
        stateful(False, "launch.nproc=2", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batch_num=2"),
        stateful(False, "launch.nproc=2", "parallel.pipeline.stages=1", "parallel.grid.dp_replicate=2"),
    ]
    first, second = ((j, plan_job(j)) for j in jobs)
    for was, now in on_ranks(2, moved, first, second, tmp_path):
        assert was == now
        assert '["calls", 8]' in now


def test_extra_state_that_cannot_be_stored_is_refused_before_the_first_step(tmp_path):
    job = stateful(
        False, "model._target_=tests.steps.stateful_nets.Odd", "launch.nproc=1", "parallel.pipeline.stages=1"
    )
    text = r"the model.get_extra_state\(\) returns a Random, which checkpoints cannot store; return numbers"
    with pytest.raises(Exception, match=text):
        on_ranks(1, stopped_and_not, job, plan_job(job), tmp_path)
