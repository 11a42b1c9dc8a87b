"""Times all samples round by round, and writes the resulting constants unless they vary too much."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from launcher.checkpoint.tensorfile.disk import write_text
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.errors import RunError
from launcher.extras.calibration import collectives, kernels
from launcher.extras.calibration.constants import (
    FittedConstant,
    MeasuredMachine,
    Round,
    Works,
    constants,
    refusal,
    taken,
)
from launcher.extras.calibration.kernels import TimedWork, one_round, prepared
from launcher.extras.calibration.refit import cluster_file
from launcher.plan.values.text import many
from launcher.runtime import device as devices
from launcher.runtime.cluster.messages import broadcast
from launcher.runtime.cluster.world import World

ROUNDS = 5
"""The least number of rounds: fewer have no quartiles."""
GB = 1 << 30


@dataclass(frozen=True)
class CalibrationSettings:
    """The file to write, the seconds to measure, and the largest spread that is accepted."""

    to: Path
    seconds: float
    spread: float


def calibrated(
    world: World, settings: CalibrationSettings, trainings: Sequence[TimedWork], trained: Works
) -> str:
    """Writes the cluster file and returns the report. Raises ``RunError`` if the spread is too large.

    Every rank calls it, and all of them raise the error. ``trainings`` are timed together with the other
    samples; ``trained`` describes their work.
    """
    machine = machine_of(world, trained, settings.to.stem)
    rounds = measured(world, settings.seconds, [*samples(world, machine), *trainings])

    # one rank decides, the others receive its decision
    fitted, others = constants(rounds, machine), taken(rounds)
    if wrong := broadcast(refusal(fitted, others, settings.spread), str | None):
        raise RunError(wrong)
    if world.rank == 0:
        make_folder(settings.to.parent)
        heads = [*_heads(world, torch.device(world.device), len(rounds))]
        write_text(settings.to, cluster_file(fitted, machine, heads, world.size // world.local_size))
    return _summary(settings.to, fitted, len(rounds), others)


def samples(world: World, machine: MeasuredMachine) -> list[TimedWork]:
    """Returns the samples besides trainings; all ranks call it."""
    device = torch.device(world.device)
    own = machine.cores is None or world.local_rank < machine.cores
    return [
        *kernels.timed_kernels(device, own, first=world.local_rank == 0),
        *collectives.timed_messages(world, device, machine.cores),
    ]


def measured(world: World, seconds: float, samples: Sequence[TimedWork]) -> list[Round]:
    """Times rounds until ``seconds`` are over; every rank times the same number of rounds."""
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


def machine_of(world: World, trained: Works, name: str) -> MeasuredMachine:
    """Returns the machine that the ranks run on."""
    on_cpu = torch.device(world.device).type == "cpu"
    cores = max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads()) if on_cpu else None
    if on_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / world.local_size
    else:
        memory = devices.total_memory(torch.device(world.device))
    return MeasuredMachine(
        name=name,
        memory_gb=memory / GB,
        per_node=world.local_size,
        cores=cores,
        precision=trained.precision,
        replicas=trained.replicas,
        stages=trained.stages,
    )


def _heads(world: World, device: torch.device, rounds: int) -> Iterator[str]:
    nodes = many(world.size // world.local_size, "node")
    chip = devices.name(device) if devices.is_accelerator(device) else _processor()
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    yield f"Measured by steps=[calibrate] on {today}: {rounds} rounds on {world.size} ranks"
    yield f"of {nodes}, {chip}, {world.backend}, torch {torch.__version__}. A spread is the distance"
    yield "between the quartiles of batches of rounds."


def _processor() -> str:
    """Returns the name of the processor, if Linux reports one."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{many(len(os.sched_getaffinity(0)), 'core')} of {names[0] if names else platform.machine()}"


def _summary(to: Path, constants: Sequence[FittedConstant], rounds: int, others: float) -> str:
    worst = max(constants, key=lambda c: c.spread)
    middle = statistics.median(c.spread for c in constants)
    use = f"--config-dir {to.parent.parent} cluster={to.stem}" if to.parent.name == "cluster" else ""
    how = use or f"move it into DIR/cluster/, then --config-dir DIR cluster={to.stem}"
    noise = f"median spread {middle:.0%}, largest {worst.spread:.0%} ({worst.key})"
    noise += f", other processes used the cores {others:.0%} of the time"
    return f"{to}: {rounds} rounds, {noise}; to use it: {how}"
