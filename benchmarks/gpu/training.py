"""Measures optimizer steps of the launcher, and compares them with their plan and a hand-written loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import kernel_groups
from benchmarks.gpu.by_hand import by_hand
from benchmarks.gpu.device import alone, describe, milliseconds, peak_bytes, reset_peak, seconds, synchronize
from benchmarks.gpu.lab import PartContext
from benchmarks.gpu.request import planned, shape
from launcher.job.schema.job import Job
from launcher.optim.build import scale_lr
from launcher.parallel.cost.memory import MemoryMeter
from launcher.parallel.local_tensors import local
from launcher.plan.plan import Plan
from launcher.runtime.training.loop import step
from launcher.runtime.training.session import Session
from launcher.steps.model import build_session

Step = Callable[[], float]
"""One optimizer step; returns its loss, so that the CPU waits for it."""


def threads(context: PartContext) -> int:
    return 1 if context.dry else context.cores


def times(context: PartContext) -> int:
    """Return how many steps are timed."""
    return 2 if context.dry else 10


def train(context: PartContext, *more: str, kernels: bool = False, cache: str = "") -> None:
    """Measure the time and memory of steps of one request, and report them with what was planned.

    ``kernels``: then one more step, whose kernels are reported. ``cache``: the name of the folder where
    compiled code is kept, which a later part may name too.
    """
    # plan without a cluster, and with the one that describes the device
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(context.root / f"compiled-{cache or context.name}")
    job, plan = planned(context, *more)
    _, named = planned(context, *more, f"cluster={context.cluster}")
    context.report(**_planned(plan, named))

    context.wait_for_turn()
    with alone(context.device, threads(context)) as world:
        # the first step compiles; the memory of the second is measured
        device = torch.device(world.device)
        made: list[Session] = []
        build = seconds(lambda: made.append(build_session.build(world, job, plan, Path())), device)
        live = made[0]
        losses: list[float] = []
        first = seconds(lambda: losses.append(one_step(live, job)), device)
        context.report(build_s=round(build, 1), first_step_s=round(first, 2))
        _fullest(context, live, job, device, losses)

        # the others are timed
        took = milliseconds(lambda: losses.append(one_step(live, job)), device, times(context))
        context.report(
            **took, **speed(context, job, plan, took["ms"]), losses=[round(x, 5) for x in losses[:4]]
        )
        if kernels:
            summary = kernel_groups.profiled(lambda: one_step(live, job), device)
            (context.folder / "kernels.txt").write_text("\n".join(kernel_groups.lines(summary)) + "\n")
            context.report(**summary)


def _planned(plan: Plan, named: Plan) -> dict[str, Any]:
    """Return the bytes and milliseconds of both plans; ``None`` if a plan predicts no time."""
    out: dict[str, Any] = {"planned_bytes": plan.estimate.memory[0].total}
    out["planned_bytes_with_cluster"] = named.estimate.memory[0].total
    for key, p in (("planned_ms", plan), ("planned_ms_with_cluster", named)):
        out[key] = None if p.estimate.step is None else round(p.estimate.step.seconds * 1e3, 1)
    return out


def speed(context: PartContext, job: Job, plan: Plan, ms: float) -> dict[str, Any]:
    """Return tokens per second and the share of the device's peak; recomputed operations count once."""
    rate = plan.estimate.flops / (ms / 1e3)
    peak = describe(context.device).peak(plan.dtypes.compute)
    out: dict[str, Any] = {"tokens_per_s": round(shape(job, plan).tokens / (ms / 1e3))}
    return out | {"mfu": None if peak is None else round(rate / peak, 4)}


def one_step(live: Session, job: Job) -> float:
    """Run one optimizer step as ``runtime.training.loop`` does."""
    scale_lr(live.optimizer, 1.0)
    with live.compile_timeout.around(live.model.compiled):
        loss, _ = step(live, job.train.clip_norm)
    live.step += 1
    return loss


def _fullest(
    context: PartContext, live: Session, job: Job, device: torch.device, losses: list[float]
) -> None:
    """Run one step, and report the bytes of tensors at its peak."""
    states = [v for state in live.optimizer.state.values() for v in state.values()]
    before = [*(t for _, t in live.model.named()), *states]
    eager_on_cpu = device.type == "cpu" and live.model.compiled is None  # compiled code escapes the meter
    meter: MemoryMeter | None = MemoryMeter(before) if eager_on_cpu else None
    held: AbstractContextManager[Any] = meter or nullcontext()
    reset_peak(device)
    with held:
        losses.append(one_step(live, job))
    synchronize(device)
    if meter is not None:
        context.report(measured_bytes=meter.peak)
    elif (most := peak_bytes(device)) is not None:
        context.report(measured_bytes=most[0], reserved_bytes=most[1])


def parity(context: PartContext) -> None:
    """Compare the launcher with a hand-written loop around the same model, from the same weights, in turn."""
    job, plan = planned(context)
    context.wait_for_turn()
    with alone(context.device, threads(context)) as world:
        device = torch.device(world.device)
        live = build_session.build(world, job, plan, Path())
        start = {name: local(t.detach()).clone().cpu() for name, t in live.model.trainable()}
        theirs = by_hand(job, plan, device, start)

        # two steps of each warm up; then they take turns
        pairs = [(one_step(live, job), theirs()) for _ in range(2)]
        ratios = []
        for _ in range(times(context)):
            ours: list[float] = []
            mine = seconds(lambda to=ours: to.append(one_step(live, job)), device)
            other = seconds(lambda to=ours: to.append(theirs()), device)
            pairs.append((ours[0], ours[1]))
            ratios.append(other / mine)
            apart = max(abs(a - b) / abs(b) for a, b in pairs)
            context.report(
                losses_apart=apart, speed_against_by_hand=round(sorted(ratios)[len(ratios) // 2], 4)
            )
