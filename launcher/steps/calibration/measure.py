"""Times everything round after round, and writes what it comes to, unless it differs too much."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from launcher.checkpoint.tensorfile.durable import write_text
from launcher.errors import RunError
from launcher.job.schema.run_paths import place
from launcher.job.schema.steps import Calibrate
from launcher.plan.calibration.cluster_file import cluster_file
from launcher.plan.calibration.constants import Constant, constants, refusal, taken
from launcher.plan.calibration.timed import Machine, Round, Trained
from launcher.plan.certify_copy import Copy
from launcher.plan.plan import Plan
from launcher.plan.values.text import many
from launcher.runtime.cluster.world import World
from launcher.runtime.training.loop import step as training_step
from launcher.runtime.training.session import Session
from launcher.steps.calibration import kernels, messages
from launcher.steps.calibration.sample import Sample, one_round, prepared
from launcher.steps.model import build_session
from launcher.steps.model.shared_construction import Drawings

ROUNDS = 5
"""At least: fewer have no quartiles."""
GB = 1 << 30
SEVERAL = 0.15
"""Seconds of steps that are timed together: ranks wait for each other now more and now less."""


def calibrated(
    world: World, step: Calibrate, copies: Sequence[tuple[Copy, Plan]], folder: Path, drawn: Drawings
) -> str:
    """Every rank calls it; returns what is to be said. Raises ``RunError`` on all where it is too noisy."""
    device = torch.device(world.device)
    to = Path(place(step.to, str(folder)))
    machine = _machine(world, copies, to.stem)
    rounds = measured(world, step.seconds, _samples(world, copies, folder, machine=machine, drawn=drawn))

    # one rank judges, all hear it
    found = constants(rounds, machine)
    others = taken(rounds)
    wrong = [refusal(found, others, step.spread)]
    dist.broadcast_object_list(wrong)
    if wrong[0]:
        raise RunError(wrong[0])
    if world.rank == 0:
        to.parent.mkdir(parents=True, exist_ok=True)
        nodes = world.size // world.local_size
        write_text(to, cluster_file(found, machine, [*_heads(world, device, len(rounds))], nodes))
    return _said(to, found, len(rounds), others)


def measured(world: World, seconds: float, samples: Sequence[Sample]) -> list[Round]:
    """As many rounds as there is time for, the same on every rank."""
    device = torch.device(world.device)
    ready = [prepared(s, device) for s in samples]
    ends = time.monotonic() + seconds
    rounds: list[Round] = []
    while True:
        rounds.append(one_round(ready, device))
        over = torch.tensor(int(len(rounds) >= ROUNDS and time.monotonic() >= ends))
        dist.broadcast(over, 0)
        if over.item():
            return rounds


def _samples(
    world: World, copies: Sequence[tuple[Copy, Plan]], folder: Path, *, machine: Machine, drawn: Drawings
) -> list[Sample]:
    device = torch.device(world.device)
    alone = machine.cores is None or world.local_rank < machine.cores
    return [
        *kernels.samples(device, alone),
        *messages.samples(world, device, machine.cores),
        *_trainings(world, copies, folder, drawn),
    ]


def _trainings(
    world: World, copies: Sequence[tuple[Copy, Plan]], folder: Path, drawn: Drawings
) -> Iterator[Sample]:
    """Steps of the real loop."""
    layouts = (Trained("replicas"), Trained("stages"))
    for what, (copy, plan) in zip(layouts, copies, strict=True):
        live = build_session.build(world, copy.job, plan, folder, drawn=drawn)

        def one(live: Session = live, clip: float | None = copy.job.train.clip_norm) -> None:
            training_step(live, clip)
            live.step += 1

        yield Sample(what, one, joint=True, least=SEVERAL)


def _machine(world: World, copies: Sequence[tuple[Copy, Plan]], name: str) -> Machine:
    (copy, replicas), (_, stages) = copies
    on_cpu = torch.device(world.device).type == "cpu"
    cores = max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads()) if on_cpu else None
    if on_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / world.local_size
    else:
        memory = torch.cuda.get_device_properties(torch.device(world.device)).total_memory
    return Machine(
        name=name,
        memory_gb=memory / GB,
        per_node=world.local_size,
        cores=cores,
        precision=copy.job.train.precision,
        replicas=replicas.estimate.work,
        stages=stages.estimate.work,
    )


def _heads(world: World, device: torch.device, rounds: int) -> Iterator[str]:
    nodes = many(world.size // world.local_size, "node")
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    yield f"Measured by steps=[calibrate] on {today}: {rounds} rounds on {world.size} ranks"
    yield f"of {nodes}, {what}, {world.backend}, torch {torch.__version__}. A spread is that between the"
    yield "quartiles of the rounds, of their median."


def _processor() -> str:
    """Its name, where Linux tells it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{many(len(os.sched_getaffinity(0)), 'core')} of {names[0] if names else platform.machine()}"


def _said(to: Path, found: Sequence[Constant], rounds: int, others: float) -> str:
    worst = max(found, key=lambda c: c.spread)
    middle = statistics.median(c.spread for c in found)
    use = f"--config-dir {to.parent.parent} cluster={to.stem}" if to.parent.name == "cluster" else ""
    how = use or f"put it into the folder cluster of a folder DIR, then --config-dir DIR cluster={to.stem}"
    noise = f"spread {middle:.0%} in the middle, {worst.spread:.0%} at most ({worst.key})"
    noise += f", others had the cores {others:.0%} of the time"
    return f"{to}: {rounds} rounds, {noise}; to use it: {how}"
