"""Compares the seconds and bytes that a plan predicts with those of the same training on this machine.

A language model trains in 12 layouts on 1, 2 and 4 ranks, each in its own processes, as in a run. Other load
on the machine must meet the calibration and all layouts alike. So they take turns: each turn calibrates, then
trains a few steps of every layout. The predictions use the calibration rounds of all turns. Run it on an idle
machine:

    python -m benchmarks.predict_here [--turns 10] [--seconds 25] [--steps 5] [--write FOLDER]

With ``--cluster`` the predictions are for a cluster that was measured before, and nothing is calibrated.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

from benchmarks.calibrated_here import calibrated, rounds
from launcher.extras.calibration.constants import MeasuredMachine, Round
from launcher.job.compose import compose
from launcher.job.schema.cluster import Cluster
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.time.prediction import predict
from launcher.plan.time.speeds import speeds_of
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.fork_server import serving_from_here
from launcher.runtime.processes.start_and_restart import run_ranks

MODEL = (
    "recipe=lm_single", "data=random_tokens", "data.vocab_size=1024", "data.seq_len=128",
    "model.dim=256", "model.layers=8", "model.heads=4", "model.tied=false",
    "train.batch_size=16", "train.precision=fp32", "steps=[train]",
)  # fmt: skip
TWO = "parallel.pipeline.stages=2"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "1 rank": ("launch.nproc=1",),
    "2 replicas": ("launch.nproc=2",),
    "tp 2": ("launch.nproc=2", "parallel.grid.tp=2", "operators=megatron"),
    **{f"2 shards, {n}": ("launch.nproc=2", "parallel.hsdp={shard_size: 2, threshold: 1}",
                          f"parallel.hsdp.optimizer_level={n}")
       for n in ("level1", "level2", "level3")},
    **{f"2 stages, {n}": ("launch.nproc=2", TWO, "parallel.pipeline.micro_batch_num=4", *more)
       for n, more in {"gpipe": ("parallel.pipeline.scheduler=gpipe",), "1f1b": (),
                       "interleaved": ("parallel.pipeline.interleave=true",),
                       "zero_bubble_h1": ("parallel.pipeline.scheduler=zero_bubble_h1",)}.items()},
    "4 stages, 1f1b": ("launch.nproc=4", "parallel.pipeline={stages: 4, micro_batch_num: 8}"),
    "2 stages x 2 shards, level1": (
        "launch.nproc=4", TWO, "parallel.pipeline.micro_batch_num=4",
        "parallel.hsdp={shard_size: 2, threshold: 1}",
    ),
}  # fmt: skip
QUIET = 0.05
"""A share of the cores: a step during which other processes used more does not count."""
TIME, MEMORY = 0.10, 0.05
"""The largest relative errors of time and memory that are allowed."""


Steps = tuple[list[float], list[float], int]
"""Milliseconds of each step, the share of the cores that others used, and the peak bytes of one step."""


@dataclass(frozen=True)
class Measured:
    """The measurements of one layout.

    ``ms``: milliseconds of each step on rank 0. ``others``: the share of the cores that other processes used
    during each step. ``held``: the peak bytes of a step on each rank.
    """

    ms: tuple[float, ...]
    others: tuple[float, ...]
    held: tuple[int, ...]

    @property
    def alone(self) -> list[float]:
        """Milliseconds of the steps that others did not disturb, but of at least the two quietest."""
        order = sorted(range(len(self.ms)), key=lambda n: self.others[n])
        count = max(2, sum(o <= QUIET for o in self.others))
        return [self.ms[n] for n in order[:count]]

    @property
    def median(self) -> float:
        return statistics.median(self.alone)

    @property
    def spread(self) -> float:
        """The distance between the quartiles, as a share of the median."""
        low, middle, high = statistics.quantiles(self.alone, n=4)
        return (high - low) / middle


def job_of(layout: Sequence[str], cluster: str, config_dir: Path | None = None) -> Job:
    return compose([*MODEL, *layout, f"cluster={cluster}"], config_dir=config_dir).job


def training(world: World, job: Job, plan: Plan) -> tuple[Callable[[], float], Callable[[], int]]:
    """Return two functions that train a step as the loop does.

    The first returns its milliseconds, the second its peak bytes.
    """
    from launcher.runtime.training.loop import step
    from launcher.steps.model import build_session
    from launcher.testing.meters import MeasuredMemory

    live = build_session.build(world, job, plan, Path())

    def timed() -> float:
        began = time.perf_counter()
        step(live, job.train.clip_norm)
        live.step += 1
        return (time.perf_counter() - began) * 1e3

    def weighed() -> int:
        states = [v for state in live.optimizer.state.values() for v in state.values()]
        with MeasuredMemory([*(t for _, t in live.model.named()), *states]) as held:
            timed()
        peak: int = held.peak
        return peak

    return timed, weighed


def work(world: World, case: tuple[Job, Plan], steps: int, patience: int) -> Steps:
    """Measure a layout on this rank, after two warm-up steps.

    It ends after ``steps`` undisturbed steps, or after ``patience`` times as many steps of any kind.
    """
    timed, weighed = training(world, *case)
    timed()
    held = weighed()
    ms, others = list[float](), list[float]()
    while sum(o <= QUIET for o in others) < steps and len(ms) < steps * patience:
        took, rest = watched(timed)
        ms.append(took)
        others.append(rest)
    return ms, others, held


def watched(timed: Callable[[], float]) -> tuple[float, float]:
    """Return the milliseconds of a step on this rank, and the share of the cores that others used."""
    import torch.distributed as dist

    dist.barrier()
    before, own = busy(), time.process_time()
    took = timed()
    dist.barrier()
    worked = busy() - before - summed(time.process_time() - own)
    return took, first(max(0.0, worked / (took / 1e3 * (os.cpu_count() or 1))))


def busy() -> float:
    """Return the seconds that the cores of this machine have worked for any process, from ``/proc/stat``."""
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return float(user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def summed(value: float) -> float:
    """Return the sum of ``value`` over all ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def first(value: float) -> float:
    """Return the value of rank 0 on every rank, so that all ranks stop at the same step."""
    import torch.distributed as dist

    return summed(value if dist.get_rank() == 0 else 0.0)


def measure(plans: Mapping[str, tuple[Job, Plan]], steps: int, patience: int) -> dict[str, Measured]:
    """Measure the layouts one after the other."""
    out = {}
    for name, case in plans.items():
        ranks: list[Steps] = run_ranks(
            partial(work, case=case, steps=steps, patience=patience), case[1].sizes.grid.size
        )
        ms, others, _ = ranks[0]
        out[name] = Measured(tuple(ms), tuple(others), tuple(held for *_, held in ranks))
    return out


def in_turns(
    plans: Mapping[str, tuple[Job, Plan]], turns: int, seconds: float, steps: int, patience: int
) -> tuple[dict[str, Measured], list[Round], MeasuredMachine]:
    """Calibrate for ``seconds``, then train ``steps`` steps of each layout; repeat this ``turns`` times."""
    each: list[dict[str, Measured]] = []
    seen: list[Round] = []
    for _ in range(turns):
        more, machine = rounds(seconds)
        seen += more
        each.append(measure(plans, steps, patience))
    return together(each), seen, machine


def together(turns: Sequence[Mapping[str, Measured]]) -> dict[str, Measured]:
    """Join the steps of several turns, layout by layout; a layout's memory is the same in each turn."""

    def of(parts: Sequence[Measured]) -> Measured:
        ms, others = (tuple(x for p in parts for x in getattr(p, name)) for name in ("ms", "others"))
        return Measured(ms, others, parts[0].held)

    return {name: of([one[name] for one in turns]) for name in turns[0]}


def predicted(plans: Mapping[str, tuple[Job, Plan]], cluster: Cluster | None) -> dict[str, float]:
    """Return the milliseconds predicted for each layout, on ``cluster`` or else on that of its request."""
    out = {}
    for name, (job, plan) in plans.items():
        at = speeds_of(cluster or job.cluster, job.train.precision, job.launch.nproc)
        assert at is not None, "the cluster has no speeds"
        out[name] = predict(plan.estimate.work, at).seconds * 1e3
    return out


def rows(
    plans: Mapping[str, tuple[Job, Plan]], found: Mapping[str, Measured], said_ms: Mapping[str, float]
) -> Iterator[tuple[str, float, float]]:
    """Yield each line of the table, and the relative errors of its seconds and bytes."""
    for name, (_, plan) in plans.items():
        m = found[name]
        off = said_ms[name] / m.median - 1
        pairs = zip(plan.estimate.memory, m.held, strict=True)
        planned, held = max(((p.total, n) for p, n in pairs), key=lambda pair: abs(pair[0] / pair[1] - 1))
        heavy = planned / held - 1
        said = [f"{said_ms[name]:.0f}", f"{m.median:.0f}", f"{off:+.1%}"]
        said += [f"{len(m.alone)} of {len(m.ms)}", f"{m.spread:.1%}"]
        said += [f"{planned / 1e6:.1f}", f"{held / 1e6:.1f}", f"{heavy:+.1%}"]
        yield f"| {name} | {' | '.join(said)} |", abs(off), abs(heavy)


HEAD = (
    "| layout | predicted ms | measured ms | error | steps | spread | predicted MB | measured MB | error |",
    "|---|---|---|---|---|---|---|---|---|",
)


def page(
    plans: Mapping[str, tuple[Job, Plan]],
    found: Mapping[str, Measured],
    cluster: Cluster | None,
    how: Sequence[str],
) -> tuple[list[str], float, float]:
    """Return the lines of the page, and the largest errors of time and memory."""
    import torch

    lines, times, bytes_ = zip(*rows(plans, found, predicted(plans, cluster)), strict=True)
    said = [
        "# Predicted and measured on one machine",
        "",
        *how,
        f"Medians of the steps during which others had at most {QUIET:.0%} of the cores; the spread is that",
        "between the quartiles. Bytes: of the rank that is furthest off.",
        "",
        *HEAD,
        *lines,
        "",
        f"Largest error: time {max(times):.1%}, memory {max(bytes_):.1%}; mean of time "
        f"{statistics.mean(times):.1%}.",
        f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, gloo.",
    ]
    return said, max(times), max(bytes_)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=10, help="of calibrating and of measuring")
    parser.add_argument("--seconds", type=float, default=25, help="of calibrating, a turn")
    parser.add_argument("--steps", type=int, default=5, help="of each layout, a turn")
    parser.add_argument("--cluster", help="one that has been measured before: nothing is calibrated")
    parser.add_argument("--config-dir", type=Path, help="a folder with cluster/NAME.yaml")
    parser.add_argument("--patience", type=int, default=3, help="times as many steps at most, for quiet ones")
    parser.add_argument("--only", default="", help="layouts whose name contains it")
    parser.add_argument("--write", type=Path, help="a folder that gets predict_here.md")
    args = parser.parse_args()

    jobs = {
        n: job_of(layout, args.cluster or "here", args.config_dir)
        for n, layout in LAYOUTS.items()
        if args.only in n
    }
    plans = {n: (job, plan_job(job)) for n, job in jobs.items()}
    if args.cluster is None:
        found, seen, machine = in_turns(plans, args.turns, args.seconds, args.steps, args.patience)
        cluster, how = calibrated(seen, machine), f"{len(seen)} rounds of calibrating, in {args.turns} turns."
    else:
        found = measure(plans, args.steps, args.patience)
        cluster, how = None, f"On `cluster={args.cluster}`."
    lines, time_off, memory_off = page(
        plans, found, cluster, [f"`python -m benchmarks.predict_here`, {date.today()}. {how}"]
    )
    print("\n".join(lines))
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "predict_here.md").write_text("\n".join(lines) + "\n")
    if time_off > TIME or memory_off > MEMORY:
        raise SystemExit(f"more than {TIME:.0%} of the time or {MEMORY:.0%} of the memory apart")


if __name__ == "__main__":
    with serving_from_here():
        main()
