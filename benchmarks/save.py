"""Measures what a checkpoint costs training: none, one that all ranks wait for, and one that a thread writes.

The default recipe's model trains in its layout (2 stages x 2-way HSDP) in four processes, with one checkpoint
every ``--steps`` steps. The three modes take turns. The stall is the time that training stands still, on the
rank where it is longest: for the full write, or for the copy that the thread writes. A block of steps ends
when the thread has finished. Run it on an idle machine:

    python benchmarks/save.py [--blocks 6] [--steps 10] [--write benchmarks/results] [override ...]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.fork_server import serving_from_here
from launcher.runtime.processes.start_and_restart import run_ranks

MODES = ("no checkpoint", "waited for", "by a thread")


@dataclass(frozen=True)
class Block:
    """Seconds of a block of steps: the stall at its start, each step, the wait for the thread at its end."""

    stall: float
    steps: tuple[float, ...]
    wait: float

    @property
    def total(self) -> float:
        return self.stall + sum(self.steps) + self.wait


def work(world: World, job: Job, plan: Plan, folder: Path, blocks: int, steps: int) -> dict[str, list[Block]]:
    """Return the timed blocks of each mode, after one warm-up block of each."""
    from launcher.optim.build import scale_lr
    from launcher.runtime.training import save
    from launcher.runtime.training.loop import step
    from launcher.steps.model import build_session

    live = build_session.build(world, job, plan, folder)
    saver = live.saver
    assert saver is not None
    starts = {
        MODES[0]: lambda: None,
        MODES[1]: lambda: save.save(live, 1),
        MODES[2]: lambda: save.save(live, 1, saver),
    }

    def one() -> float:
        began = time.perf_counter()
        scale_lr(live.optimizer, 1.0)
        step(live, job.train.clip_norm)
        live.step += 1
        return time.perf_counter() - began

    out: dict[str, list[Block]] = {mode: [] for mode in MODES}
    for block in range(blocks + 1):
        for mode, start in starts.items():
            began = time.perf_counter()
            start()
            stall = time.perf_counter() - began
            times = tuple(one() for _ in range(steps))
            began = time.perf_counter()
            saver.wait()
            if block:
                out[mode].append(Block(stall, times, time.perf_counter() - began))
    return out


def rows(found: Sequence[dict[str, list[Block]]], nbytes: int) -> Iterator[str]:
    """Yield the lines of the table, as medians over the blocks; ``found`` has an entry per rank."""
    plain = statistics.median(t for b in found[0][MODES[0]] for t in b.steps)
    yield f"one step {plain * 1e3:.1f} ms, one checkpoint {nbytes / 1e6:.1f} MB"
    yield f"{'':<14}{'stall ms':>9}{'worst ms':>9}{'in steps':>9}{'block ms':>9}{'ratio':>7}"
    base = [b.total for b in found[0][MODES[0]]]
    for mode in MODES:
        stalls = [max(b.stall for b in at) for at in zip(*(r[mode] for r in found), strict=True)]
        blocks = [b.total for b in found[0][mode]]
        ratio = statistics.median(a / b for a, b in zip(blocks, base, strict=True))
        middle = statistics.median(stalls)
        yield (
            f"{mode:<14}{middle * 1e3:>9.2f}{max(stalls) * 1e3:>9.2f}{middle / plain:>9.3f}"
            f"{statistics.median(blocks) * 1e3:>9.1f}{ratio:>7.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--write", type=Path, help="a folder that gets save.txt")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()

    asked = ["recipe=lm_tied_pp2_hsdp2", "checkpoint.every=1", "checkpoint.async=true", *args.overrides]
    job = compose(asked).job
    plan = plan_job(job)
    with TemporaryDirectory(prefix="save-") as folder:
        run = partial(work, job=job, plan=plan, folder=Path(folder), blocks=args.blocks, steps=args.steps)
        found = run_ranks(run, plan.sizes.grid.size)
        nbytes = sum(p.stat().st_size for p in Path(folder).rglob("rank_*/*"))

    from torch import __version__ as torch

    said = f"{args.blocks} blocks of {args.steps} steps of each, {' '.join(asked)}; "
    said += f"torch {torch}, {os.cpu_count()} cores, {platform.machine()}"
    lines = [*rows(found, nbytes), said]
    print("\n".join(lines))
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "save.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with serving_from_here():
        main()
