"""Measures collectives, bytes and step time of each comm_fusion setting, and the speed of the network.

The same language model trains in the same layout (2 replicas x 2-way FSDP2, level1) in the same four gloo
ranks. The settings take turns: A B C A B C. The line ``network`` has the values of
``parallel.comm_fusion.network`` for this machine: the time of a small all-reduce, and the bandwidth of a
large one. Run it on an idle machine:

    python benchmarks/fusion.py [--write benchmarks/results] [--blocks 6] [--steps 5] [override ...]
"""

from __future__ import annotations

import argparse
import platform
import statistics
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

LAYOUT = (
    "recipe=lm_single", "data=random_tokens", "launch.nproc=4", "train.batch_size=16", "train.precision=fp32",
    "steps=[train]", "parallel.grid.dp_replicate=2", "parallel.hsdp={shard_size: 2, threshold: 16}",
)  # fmt: skip
SETTINGS: dict[str, tuple[str, ...]] = {
    "off": ("parallel.comm_fusion={openstate: false}",),
    "auto": (),
    "size 1 MB": (
        "parallel.comm_fusion={allgather: {mode: size, config: 1}, allreduce: {mode: size, config: 1}}",
    ),
    "size 64 MB": ("parallel.comm_fusion={allgather: {mode: size}, allreduce: {mode: size}}",),
    "index": ("parallel.comm_fusion={allreduce: {mode: index, config: [9, 18]}}",),
}
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Measured:
    """The results of one setting on one rank.

    ``counts``: the (count, bytes) per step of each kind of collective. ``ms``: the milliseconds per step of
    every block.
    """

    counts: dict[str, tuple[int, int]]
    ms: list[float]


def one_step(world: World, job: Job, plan: Plan) -> Callable[[], Any]:
    """Return a function that runs one optimizer step as ``runtime.training.loop`` does."""
    from launcher.runtime.training.loop import step
    from launcher.steps.model import build_session

    live = build_session.build(world, job, plan, Path())

    def one() -> None:
        step(live, job.train.clip_norm)
        live.step += 1

    return one


def work(
    world: World, cases: list[tuple[Job, Plan]], blocks: int, steps: int
) -> tuple[list[Measured], float, float]:
    """Measure each case after two warm-up steps, then the latency (us) and bandwidth (GB/s) of the
    network.
    """
    from launcher.testing.meters import CollectiveMeter

    # the first step warms up; the collectives of the second are counted
    runs = [one_step(world, job, plan) for job, plan in cases]
    counts = []
    for one in runs:
        one()
        with CollectiveMeter() as seen:
            one()
        counts.append(seen.totals())

    # in turn, block by block
    ms: list[list[float]] = [[] for _ in runs]
    for _ in range(blocks):
        for took, one in zip(ms, runs, strict=True):
            began = time.perf_counter()
            for _ in range(steps):
                one()
            took.append((time.perf_counter() - began) / steps * 1e3)
    return [Measured(c, m) for c, m in zip(counts, ms, strict=True)], *network()


def network(times: int = 20, size: int = 1 << 22) -> tuple[float, float]:
    """Return the latency (us) of a small all-reduce, and the bandwidth (GB/s) of one of ``size`` bytes.

    The latency does not count in the bandwidth.
    """
    small, large = (_all_reduce(n, times) for n in (4, size))
    return small * 1e6, size / max(large - small, 1e-9) / 1e9


def _all_reduce(nbytes: int, times: int) -> float:
    """Return the median seconds of an all-reduce."""
    import torch
    import torch.distributed as dist

    x, took = torch.zeros(nbytes // 4), []
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(x)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def rows(found: dict[str, Measured]) -> Iterator[str]:
    heads = "".join(f"{k.replace('_', '-'):>22}" for k in KINDS)
    yield f"{'comm_fusion':<12}{heads}{'ms a step':>11}{'min':>8}{'max':>8}"
    for name, f in found.items():
        held = (f.counts.get(k, (0, 0)) for k in KINDS)
        cells = "".join(f"{f'{n}: {b / 2**20:.2f} MB':>22}" for n, b in held)
        yield f"{name:<12}{cells}{statistics.median(f.ms):>11.1f}{min(f.ms):>8.1f}{max(f.ms):>8.1f}"


def table(blocks: int, steps: int, overrides: list[str]) -> Iterator[str]:
    import torch

    jobs = [compose([*LAYOUT, *setting, *overrides]).job for setting in SETTINGS.values()]
    cases = [(job, plan_job(job)) for job in jobs]
    found, latency, speed = run_ranks(partial(work, cases=cases, blocks=blocks, steps=steps), 4)[0]
    for (_, plan), f in zip(cases, found, strict=True):
        planned = {t.kind: (t.count, t.nbytes) for t in plan.estimate.traffic if t.rank == 0}
        if planned != f.counts:
            raise SystemExit(f"planned {planned}, counted {f.counts}")
    yield from rows(dict(zip(SETTINGS, found, strict=True)))
    yield f"of rank 0, as planned; {blocks} blocks of {steps} steps, in turn"
    yield f"network: {{latency_us: {latency:.0f}, gb_per_s: {speed:.2f}}}"
    yield f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, gloo"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--write", type=Path, help="a folder that gets fusion.txt")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    lines = list(table(args.blocks, args.steps, args.overrides))
    print("\n".join(lines))
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "fusion.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with serving_from_here():
        main()
