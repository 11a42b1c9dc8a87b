"""Compares the step time with all installed loggers to that of the same steps without loggers.

The default recipe trains on four ranks. Blocks of steps run in pairs: the rows of one block go to the
loggers, as in a run; those of the other go only to the page of the run. Run it on an idle machine:

    python benchmarks/loggers.py [--blocks 8] [--steps 12] [override ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from launcher.extras.loggers import process
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.run.page_and_loggers import Viewers, viewers
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.fork_server import serving_from_here
from launcher.runtime.processes.start_and_restart import run_ranks

FIGURES = (
    "loss", "lr", "grad_norm", "tokens_per_s", "samples_per_s",
    "step_ms", "bubble", "memory_mb", "tflops", "mfu",
)  # fmt: skip


def work(world: World, job: Job, plan: Plan, blocks: int, steps: int) -> dict[bool, list[float]]:
    """Return the milliseconds per step of every block, with and without loggers, after two warm-up pairs."""
    from launcher.optim.build import scale_lr
    from launcher.runtime.training.loop import step
    from launcher.steps.model import build_session

    live = build_session.build(world, job, plan, Path())
    out: dict[bool, list[float]] = {True: [], False: []}
    for block in range(blocks + 2):
        for logged in (True, False) if block % 2 else (False, True):
            began = time.perf_counter()
            for _ in range(steps):
                scale_lr(live.optimizer, 1.0)
                loss, _ = step(live, job.train.clip_norm)
                live.step += 1
                if world.rank == 0:
                    row = dict.fromkeys(FIGURES, loss)
                    world.send({"logged": logged, "row": {"step": live.step, "steps": 9999, **row}})
            if block >= 2:
                out[logged].append((time.perf_counter() - began) / steps * 1e3)
            time.sleep(0.3)  # rows on their way must not delay the next block
    return out


def hear(shown: Viewers, rank: int, news: Mapping[str, Any]) -> None:
    """Send a row to the loggers and to the page; if it is not to be logged, to the page only."""
    if news["logged"]:
        shown.feed(news["row"])
    elif shown.page is not None:
        shown.page.feed(news["row"])


def begin(shown: Viewers) -> None:
    """Wait for the loggers to start: importing packages and creating databases must not count in a step."""
    shown.feed({"step": 0})
    while not all(one.busy() and one.taken for one in shown.others):
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()

    every = compose(["logger=[tensorboard,wandb,mlflow,trackio]"]).job
    lack = {problem.key.removeprefix("logger.") for problem in process.problems(every)}
    names = [name for name in process.PACKAGES if name not in lack]
    job = compose(["recipe=lm_tied_pp2_hsdp2", f"logger=[{','.join(names)}]", *args.overrides]).job
    plan = plan_job(job)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "config.yaml").write_text("name: x\n")
        (run / "plan.txt").write_text("a plan\n")
        (run / "metrics.jsonl").write_text("")
        with viewers(run, job, [], []) as shown:
            begin(shown)
            task = partial(work, job=job, plan=plan, blocks=args.blocks, steps=args.steps)
            times = run_ranks(task, plan.sizes.grid.size, on_message=partial(hear, shown))[0]

    for logged, ms in times.items():
        spread = f"min {min(ms):.1f}, max {max(ms):.1f}, {len(ms)} blocks of {args.steps}"
        what = ", ".join(names) if logged else "none"
        print(f"{statistics.median(ms):7.1f} ms a step  ({spread})  loggers: {what}")
    pairs = [a / b for a, b in zip(times[True], times[False], strict=True)]
    print(f"ratio {statistics.median(pairs):.3f}  (median of {len(pairs)} neighboring pairs)")


if __name__ == "__main__":
    with serving_from_here():
        main()
