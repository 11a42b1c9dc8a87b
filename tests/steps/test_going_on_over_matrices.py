"""A run over device matrices resumes from its checkpoints, also with other strategies and tied weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import checkpoint_tensors, loop
from launcher.steps import train
from launcher.steps.model import build_session
from tests.ranks import DRAWN, on_ranks

COMMON = (
    "model=lm", "model.vocab_size=64", "model.dim=16", "model.layers=2", "model.heads=2", "model.tied=true",
    "data=random_tokens", "data.vocab_size=64", "data.seq_len=8", "launch.nproc=4", "train.batch_size=8",
    "parallel.pipeline.stages=2", "parallel.pipeline.stage_config=auto", "parallel.pipeline.micro_batch_num=2",
    "steps=[train]", "train.precision=fp64", "checkpoint.every=2", "checkpoint.keep=null", "train.steps=4",
)  # fmt: skip
OVER = "matrix: [2], axes: [x], "
FIRST = (
    f"parallel.operators={{layers.*.attn.q: {{{OVER}in: [[null,x,null],[null,null]]}},"
    " layers.*.mlp.down: {in: [[1,1,2],[1,2]]}}"
)
OTHERS: dict[str, tuple[str, ...]] = {
    "other cuts": (f"parallel.operators={{layers.*.mlp.up: {{{OVER}in: [[null,null,null],[x,null]]}},"
                   " head: {in: [[1,2,1],[1,1]]}}",
                   "parallel.hsdp=null"),
    "level3": (FIRST, "parallel.hsdp={shard_size: -1, threshold: 0, optimizer_level: level3}"),
    "axis tp": ("operators=megatron",
                "parallel.grid.tp=2", "parallel.hsdp=null"),
}  # fmt: skip


def job(*more: str) -> Job:
    return compose([*COMMON, *more]).job


def losses(
    world: World, first: tuple[Job, Plan], others: dict[str, tuple[Job, Plan]], folder: Path
) -> dict[str, list[Any]]:
    """Return steps 3 and 4 of a run without a stop, and of runs that resume from the checkpoint of step 2."""
    rows: list[Any] = []
    straight = build_session.build(replace(world, send=rows.append), *first, folder, drawn=DRAWN)
    loop.train(straight, train.loop_settings(straight, first[0]))
    out = {"straight": rows}
    for name, (j, plan) in others.items():
        out[name] = []
        again = build_session.build(replace(world, send=out[name].append), j, plan, folder / name, drawn=DRAWN)
        checkpoint_tensors.load(again, folder / "checkpoints/step-000002")
        loop.train(again, train.loop_settings(again, j))
    return {name: [(r["step"], r["loss"], r["grad_norm"]) for r in told if "loss" in r] for name, told in out.items()}


def test_a_run_goes_on_as_it_would_have_with_whatever_strategies(tmp_path: Path) -> None:
    level1 = "parallel.hsdp={shard_size: -1, threshold: 0, optimizer_level: level1}"
    first = job(FIRST, level1)
    plans = {name: (job(*more), plan_job(job(*more))) for name, more in {"same": (FIRST, level1), **OTHERS}.items()}
    assert [plan.sharding is not None for _, plan in plans.values()] == [True, True, True, False]
    found = on_ranks(4, losses, (first, plan_job(first)), plans, tmp_path)[0]
    assert found["same"] == found["straight"][2:]
    for name in OTHERS:
        for got, want in zip(found[name], found["straight"][2:], strict=True):
            assert got == pytest.approx(want, rel=1e-12, abs=0)
