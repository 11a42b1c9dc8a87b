"""Compares the extra time of a step with recomputed blocks to the extra FLOPs in its plan.

A language model runs on one rank with one thread, under each policy in turn. Both ratios are to the step
without recomputation. A forward counts 1 and its backward 2. The policy selective keeps the results of matrix
products, so it recomputes none of them.

    python benchmarks/recompute.py [--steps 5] [--blocks 5] [--write benchmarks/results] [override ...]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.fork_server import serving_from_here
from launcher.runtime.processes.start_and_restart import run_ranks

MODEL = (
    "recipe=lm_single", "data=random_tokens", "data.vocab_size=512", "data.seq_len=128",
    "model.vocab_size=512", "model.dim=512", "model.layers=4", "model.heads=8", "model.tied=false",
    "train.batch_size=8", "train.precision=fp32", "steps=[train]",
)  # fmt: skip
POLICIES = {
    "none": (),
    "selective": ("parallel.recompute={modules: layers.*, policy: selective}",),
    "half": ("parallel.recompute={modules: layers.*, every: 2}",),
    "full": ("parallel.recompute={modules: layers.*}",),
}


def measure(world: World, cases: list[tuple[Job, Plan]], blocks: int, steps: int) -> list[float]:
    """Return the seconds per step of each case: the median of blocks that run in turn."""
    from launcher.runtime.training.loop import step
    from launcher.steps.model import build_session

    lives = [build_session.build(world, job, plan, Path()) for job, plan in cases]
    took: list[list[float]] = [[] for _ in cases]
    for block in range(blocks + 1):
        for live, (job, _), seconds in zip(lives, cases, took, strict=True):
            start = time.perf_counter()
            for _ in range(steps):
                step(live, job.train.clip_norm)
                live.step += 1
            if block:  # the first one warms up
                seconds.append((time.perf_counter() - start) / steps)
    return [statistics.median(seconds) for seconds in took]


def flops(plan: Plan) -> int:
    """Return the FLOPs of one micro batch: forward, backward and recomputation."""
    return 3 * sum(s.flops for s in plan.stages) + sum(r.flops for r in plan.estimate.rerun)


def table(cases: dict[str, tuple[Job, Plan]], took: list[float]) -> Iterator[str]:
    yield f"{'recompute':<12}{'ms a step':>12}{'measured':>12}{'planned':>12}{'saved MB':>12}"
    base = flops(cases["none"][1])
    for (name, (_, plan)), seconds in zip(cases.items(), took, strict=True):
        spared = sum(r.spared for r in plan.estimate.rerun) / 2**20
        ratios = f"{seconds / took[0]:>12.3f}{flops(plan) / base:>12.3f}"
        yield f"{name:<12}{1000 * seconds:>12.1f}{ratios}{spared:>12.1f}"


def machine() -> str:
    import torch

    return f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one thread"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5, help="in a block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--write", type=Path, help="a folder that gets recompute.txt")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    jobs = {name: compose([*MODEL, *words, *args.overrides]).job for name, words in POLICIES.items()}
    cases = {name: (job, plan_job(job)) for name, job in jobs.items()}
    work = partial(measure, cases=list(cases.values()), blocks=args.blocks, steps=args.steps)
    lines = [*table(cases, run_ranks(work, 1)[0]), machine()]
    print("\n".join(lines))
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "recompute.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with serving_from_here():
        main()
