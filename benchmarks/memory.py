"""Compares the memory that a training step uses on every rank to that in its plan.

A small language model trains on gloo ranks of this machine under each level of HSDP, on one stage and on
pipelines, with and without recomputed blocks. The bytes of all live tensors are measured at the peak of the
second step. CPU kernels' own scratch memory is not measured.

    python benchmarks/memory.py [--write benchmarks/results] [--only WORD] [override ...]
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.memory.rank_memory import Memory
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.fork_server import serving_from_here
from launcher.runtime.processes.start_and_restart import run_ranks

MODEL = (
    "recipe=lm_single", "data=random_tokens", "data.vocab_size=512", "data.seq_len=64",
    "model.vocab_size=512", "model.dim=128", "model.layers=8", "model.heads=4", "model.tied=false",
    "train.batch_size=16", "train.precision=fp32", "steps=[train]",
)  # fmt: skip
LEVELS: dict[str, tuple[str, ...]] = {
    "unsharded": ("parallel.grid.dp_replicate=2",),
    **{n: ("parallel.hsdp={shard_size: 2, threshold: 1}", f"parallel.hsdp.optimizer_level={n}")
       for n in ("level1", "level2", "level3")},
}  # fmt: skip
PIPELINES = {
    "one stage": ("parallel.pipeline.micro_batch_num=2",),
    "1f1b": ("parallel.pipeline={stages: 2, micro_batch_num: 4}",),
    "gpipe": ("parallel.pipeline={stages: 2, micro_batch_num: 4, scheduler: gpipe}",),
    "interleaved": ("parallel.pipeline={stages: 2, micro_batch_num: 4, interleave: true}",),
    "zero_bubble_h1": ("parallel.pipeline={stages: 2, micro_batch_num: 4, scheduler: zero_bubble_h1}",),
    "zero_bubble_v": ("parallel.pipeline={stages: 2, micro_batch_num: 4, scheduler: zero_bubble_v}",),
    "dualpipe_v": ("parallel.pipeline={stages: 2, micro_batch_num: 4, scheduler: dualpipe_v}",),
    "seqpipe": ("parallel.pipeline={stages: 2, micro_batch_num: 4, scheduler: seqpipe, seq_chunks: 2}",),
    "seqpipe of 4": ("parallel.pipeline={stages: 2, micro_batch_num: 4, scheduler: seqpipe, seq_chunks: 4}",),
    **{
        n: ("parallel.pipeline={stages: 2, micro_batch_num: 4, seq_chunks: 2, interleave: true}",
            f"parallel.pipeline.scheduler={n}")
        for n in ("seqvpp", "seqsmartvpp")
    },
}  # fmt: skip
POLICIES: dict[str, tuple[str, ...]] = {
    "none": (),
    **{n: (f"parallel.recompute={{modules: layers.*, policy: {n}}}",) for n in ("full", "selective")},
}
SPLIT = ("zero_bubble_h1", "zero_bubble_v", "dualpipe_v")
"""Schedules that gather weights only once, so that level3 does not exist for them."""


@dataclass(frozen=True)
class Case:
    """One layout; the table has a row for each of its ranks."""

    pipeline: str
    level: str
    policy: str

    def __str__(self) -> str:
        return f"{self.pipeline} {self.level} {self.policy}"

    def job(self, overrides: list[str]) -> Job:
        ranks = f"launch.nproc={2 if self.pipeline == 'one stage' else 4}"
        layout = (*PIPELINES[self.pipeline], *LEVELS[self.level], *POLICIES[self.policy])
        return compose([*MODEL, ranks, *layout, *overrides]).job


CASES = tuple(
    Case(p, n, way)
    for way in POLICIES
    for p in PIPELINES
    for n in LEVELS
    if not (p in SPLIT and n == "level3")
)


def measure(world: World, job: Job, plan: Plan) -> int:
    """Return the peak bytes of the second step; the optimizer creates its state in the first."""
    from launcher.runtime.training.loop import step
    from launcher.steps.model import build_session
    from launcher.testing.meters import MeasuredMemory

    live = build_session.build(world, job, plan, Path())
    for _ in range(2):
        states = [v for state in live.optimizer.state.values() for v in state.values()]
        with MeasuredMemory([*(t for _, t in live.model.named()), *states]) as held:
            step(live, job.train.clip_norm)
        live.step += 1
    return held.peak


def rows(case: Case, planned: tuple[Memory, ...], measured: list[int]) -> Iterator[str]:
    for m, n in zip(planned, measured, strict=True):
        parts = (m.params, m.grads, m.optimizer, m.gathered, m.activations, m.total, n)
        kilobytes = "".join(f"{b / 1024:>12.1f}" for b in parts)
        named = f"{case.pipeline:<15}{case.level:<10}{case.policy:<10}"
        yield f"{named}{m.rank:>5}{kilobytes}{m.total / n - 1:>8.1%}"


def head() -> str:
    names = ("params", "gradients", "optimizer", "gathered", "activations", "planned KB", "measured KB")
    titles = "".join(f"{n:>12}" for n in names)
    return f"{'pipeline':<15}{'level':<10}{'recompute':<10}{'rank':>5}{titles}{'error':>8}"


def machine() -> str:
    import torch

    return f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, gloo"


def table(only: str, overrides: list[str]) -> Iterator[tuple[str, float]]:
    """Yield each line of the table, and the relative difference between its planned and measured bytes."""
    yield head(), 0.0
    for case in (c for c in CASES if only in str(c)):
        job = case.job(overrides)
        plan = plan_job(job)
        measured = run_ranks(partial(measure, job=job, plan=plan), plan.sizes.grid.size)
        memory = plan.estimate.memory
        for m, n, line in zip(memory, measured, rows(case, memory, measured), strict=True):
            yield line, abs(m.total / n - 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows whose pipeline, level and recompute contain it")
    parser.add_argument("--write", type=Path, help="a folder that gets memory.txt")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    lines, worst = [], 0.0
    for line, off in table(args.only, args.overrides):
        print(line, flush=True)
        lines.append(line)
        worst = max(worst, off)
    lines += [f"largest difference {worst:.1%}", machine()]
    print("\n".join(lines[-2:]))
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "memory.txt").write_text("\n".join(lines) + "\n")
    if worst > 0.05:
        raise SystemExit("more than 5 % apart")


if __name__ == "__main__":
    with serving_from_here():
        main()
