"""Compares a step with compiled blocks to an eager step, and times compilation: cold, and from the cache.

One language model runs on one rank, eager and with ``train.compile={}`` (inductor), in turn: A B A B. The
first step compiles. The first start of the job has an empty cache; a second start compiles from the cache.
Run it on an idle machine:

    python benchmarks/compile.py [--write benchmarks/results] [--blocks 6] [--steps 5] [override ...]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.fork_server import serving_from_here
from launcher.runtime.processes.start_and_restart import run_ranks

MODEL = (
    "recipe=lm_single", "data=random_tokens", "train.batch_size=16", "train.precision=fp32", "steps=[train]",
)  # fmt: skip
WAYS: dict[str, tuple[str, ...]] = {"eager": (), "compiled": ("train.compile={}",)}
FIRST_S = 600


@dataclass(frozen=True)
class Timings:
    """The times of one way in one start: seconds of the first step, milliseconds per step of every block."""

    first_s: float
    ms: list[float]


def one_step(world: World, job: Job, plan: Plan) -> Callable[[], Any]:
    """Return a function that runs one optimizer step as ``runtime.training.loop`` does."""
    from launcher.runtime.training.loop import step
    from launcher.steps.model import build_session

    live = build_session.build(world, job, plan, Path())

    def one() -> None:
        with live.compile_timeout.around(live.model.compiled):
            step(live, job.train.clip_norm)
        live.step += 1

    return one


def work(world: World, cases: list[tuple[Job, Plan]], blocks: int, steps: int) -> list[Timings]:
    """Time each case; their blocks run in turn."""
    runs, first, ms = [], [], [list[float]() for _ in cases]
    for job, plan in cases:
        runs.append(one_step(world, job, plan))
        first.append(_seconds(runs[-1], 1))
    for _ in range(blocks):
        for took, one in zip(ms, runs, strict=True):
            took.append(_seconds(one, steps) * 1e3)
    return [Timings(seconds, m) for seconds, m in zip(first, ms, strict=True)]


def _seconds(one: Callable[[], Any], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        one()
    return (time.perf_counter() - began) / times


def table(blocks: int, steps: int, overrides: list[str]) -> Iterator[str]:
    import torch

    # two starts that share a cache, empty at first
    jobs = [compose([*MODEL, *way, *overrides]).job for way in WAYS.values()]
    measure = partial(work, cases=[(job, plan_job(job)) for job in jobs], blocks=blocks, steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        (eager, cold), (_, warm) = (run_ranks(measure, 1, timeout_s=FIRST_S)[0] for _ in range(2))

    yield f"{'':<10}{'ms a step':>10}{'min':>8}{'max':>8}{'first step, s':>15}{'from the cache, s':>19}"
    for name, found, again in (("eager", eager, ""), ("compiled", cold, f"{warm.first_s:.1f}")):
        ms = f"{statistics.median(found.ms):>10.1f}{min(found.ms):>8.1f}{max(found.ms):>8.1f}"
        yield f"{name:<10}{ms}{found.first_s:>15.1f}{again:>19}".rstrip()
    ratio = statistics.median(cold.ms) / statistics.median(eager.ms)
    yield f"ratio {ratio:.2f}; {blocks} blocks of {steps} steps, in turn"
    yield f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one rank"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--write", type=Path, help="a folder that gets compile.txt")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    lines = list(table(args.blocks, args.steps, args.overrides))
    print("\n".join(lines))
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "compile.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with serving_from_here():
        main()
