"""The memory that a training step really uses on each rank is the memory in the plan."""

from __future__ import annotations

import gc
import hashlib
import sys
from threading import Event, Thread
from typing import Any

import pytest
import torch

from launcher.job.schema.job import Job
from launcher.optim.build import build_optimizer
from launcher.parallel.cost.memory import MetaMeter
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.testing.meters import MeasuredMemory
from tests.parity import build, job, step
from tests.ranks import on_ranks
from tests.tiers import ALL, some

MODEL = {"name": "lm", "vocab_size": 256, "dim": 128, "layers": 4, "heads": 4}
TOKENS = {"name": "random_tokens", "vocab_size": 256, "seq_len": 64}
LEVELS = ("unsharded", "level1", "level2", "level3")
PIPELINES: dict[str, dict[str, Any]] = {
    "one stage": {"micro_batch_num": 2},
    "1f1b": {"stages": 2, "micro_batch_num": 4},
    "interleaved": {"stages": 2, "interleave": True, "micro_batch_num": 4},
    **{
        name: {"stages": 2, "scheduler": name, "micro_batch_num": 4}
        for name in ("zero_bubble_h1", "zero_bubble_v", "dualpipe_v")
    },
    "seqpipe": {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 4, "micro_batch_num": 4},
}
CASES = [
    *(("one stage", level) for level in LEVELS),
    *some([
        *(("1f1b", level) for level in LEVELS), ("interleaved", "level2"),
        ("zero_bubble_h1", "level1"), ("zero_bubble_h1", "level2"), ("zero_bubble_v", "level2"),
        ("dualpipe_v", "unsharded"), ("seqpipe", "unsharded"),
    ]),
]  # fmt: skip


def layout(pipeline: str, level: str, recompute: dict[str, Any] | None = None) -> Job:
    """A job on 4 ranks."""
    parallel: dict[str, Any] = {"pipeline": PIPELINES[pipeline], "recompute": recompute}
    if level == "unsharded":
        parallel |= {"grid": {"dp_replicate": 4 if pipeline == "one stage" else 2}}
    else:
        parallel |= {"hsdp": {"threshold": 1, "optimizer_level": level}, "grid": {"dp_shard": 2}}
        parallel["grid"] |= {"dp_replicate": 2} if pipeline == "one stage" else {}
    train = {"steps": 1, "batch_size": 16, "precision": "fp32"}
    return job(model=MODEL, data=TOKENS, parallel=parallel, train=train)


def rank_peaks(world: World, cases: list[tuple[Job, Plan]]) -> list[int]:
    return [rank_peak(world, j, plan) for j, plan in cases]


def rank_peak(world: World, j: Job, plan: Plan) -> int:
    """Peak bytes of all tensors in the second step; the first step makes the optimizer's state."""
    par, pipe = build(world, j, plan)
    optimizer = build_optimizer(j.optim, par.param_groups())
    optimizer.zero_grad(set_to_none=True)
    step(j, par, pipe)
    optimizer.step()
    gc.collect()  # frees tensors of the first step, which would otherwise be freed in the second
    there = [*(t for _, t in par.named()), *(v for s in optimizer.state.values() for v in s.values())]
    with MeasuredMemory(there) as held:
        optimizer.zero_grad(set_to_none=True)
        step(j, par, pipe)
        optimizer.step()
    return held.peak


@pytest.fixture(scope="module")
def steps() -> dict[tuple[str, str], tuple[list[int], list[int]]]:
    """Bytes of each rank, measured and planned."""
    jobs = [layout(*case) for case in CASES]
    plans = [plan_job(j) for j in jobs]
    got = on_ranks(4, rank_peaks, list(zip(jobs, plans, strict=True)))
    planned = [[m.total for m in p.estimate.memory] for p in plans]
    return dict(zip(CASES, zip(map(list, zip(*got, strict=True)), planned, strict=True), strict=True))


@pytest.mark.parametrize(("pipeline", "level"), CASES)
def test_planned_bytes_of_every_rank_are_within_5_percent_of_measured(steps, pipeline, level):
    measured, planned = steps[pipeline, level]
    off = [p / m - 1 for m, p in zip(measured, planned, strict=True)]
    assert all(abs(error) <= 0.05 for error in off), [f"{error:+.1%}" for error in off]


@pytest.mark.parametrize("pipeline", ["one stage", "1f1b"] if ALL else ["one stage"])
@pytest.mark.parametrize("which", [0, 1], ids=["measured", "planned"])
def test_bytes_fall_level_by_level(steps, pipeline, which):
    for rank in range(4):
        held = [steps[pipeline, level][which][rank] for level in LEVELS]
        assert held == sorted(set(held), reverse=True)


def test_a_storage_is_counted_once_and_while_it_lives():
    with MeasuredMemory() as held:
        x = torch.zeros(1000)
        y = x.view(10, 100)[:5]
        assert held.now == 4000
        z = y + 1
        assert held.now == 4000 + 2000
        del x, y, z
        assert held.now == 0
    assert held.peak == 6000


def test_a_storage_on_meta_counts_at_its_current_size_and_gradients_apart():
    weight = torch.nn.Parameter(torch.empty(1000, device="meta"))
    with MetaMeter([weight], before=[weight]) as held:
        x = torch.empty(500, device="meta")
        assert held.now == 4000 + 2000
        x.resize_(750)
        assert held.now == 4000 + 3000
        del x
        (weight * 2).sum().backward()
        assert held.now == 4000
        held.restart()
        torch.empty(250, device="meta")
    assert (held.peak, held.summed) == (5000, 9000)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system says which threads run")
def test_tensors_that_another_thread_is_about_to_release_are_not_counted():
    holds = Event()

    def transport(messages: list[torch.Tensor]) -> None:
        holds.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # busy without the interpreter's lock, as gloo is
        messages.clear()

    with MeasuredMemory() as held:
        thread = Thread(target=transport, args=([torch.zeros(1000)],))
        assert held.peak == 4000
        thread.start()
        holds.wait()
        x = torch.ones(1500)
    thread.join()
    assert held.peak == x.nbytes == 6000
