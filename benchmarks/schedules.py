"""Compares the step time of every schedule on torch's pipeline runtime to that in the planner's simulator.

Stages only sleep for as long as their share of a micro batch takes, so that four ranks do not need four
cores. One number is fitted over all rows: the time that the runtime adds to every action. Run it on an idle
machine:

    python benchmarks/schedules.py [--unit 0.03] [--times 3] [--micros 8] [--ranks 4] [--tolerance 0.1]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from launcher.plan.schedule import schedules
from launcher.plan.schedule.schedules import Action, Schedule
from launcher.plan.schedule.simulate import Cost, Timeline, simulate
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.fork_server import serving_from_here
from launcher.runtime.processes.start_and_restart import run_ranks

FORWARD, INPUT, WEIGHT = 1.0, 1.0, 1.0
"""Times of a micro batch on one rank, in units: forward, and the two halves of backward."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    scheduler: str
    chunks: int = 1
    pieces: int = 1
    less_memory: bool = False

    def schedule(self, ranks: int, micros: int) -> Schedule:
        return schedules.build(self.scheduler, ranks, self.chunks, micros, self.less_memory, self.pieces)

    def places(self, ranks: int) -> tuple[int, ...]:
        return schedules.placement(ranks, self.chunks, schedules.RULES[self.scheduler].v)

    def simulated(self, ranks: int, micros: int, unit: float, overhead: float) -> Timeline:
        """Simulate the schedule in seconds; ``overhead`` is added to every action."""
        part = unit / self.chunks / self.pieces
        n = ranks * self.chunks * self.pieces
        cost = Cost(
            forward=(FORWARD * part,) * n,
            backward=((INPUT + WEIGHT) * part,) * n,
            activation=(1,) * n,
            weight=(WEIGHT * part,) * n,
            pieces=self.pieces,
        )
        return simulate(
            self.schedule(ranks, micros), self.places(ranks), Loaded(**vars(cost), overhead=overhead)
        )


@dataclass(frozen=True)
class Loaded(Cost):
    """Costs that include the time that the runtime adds to every action."""

    overhead: float = 0.0

    def time(self, a: Action) -> float:
        return super().time(a) + self.overhead


CASES = (
    Case("gpipe", "gpipe"),
    Case("looped BFS", "gpipe", chunks=2),
    Case("1f1b", "1f1b"),
    Case("interleaved", "1f1b", chunks=2),
    Case("less memory", "1f1b", chunks=2, less_memory=True),
    Case("zero_bubble_h1", "zero_bubble_h1"),
    Case("zero_bubble_v", "zero_bubble_v", chunks=2),
    Case("dualpipe_v", "dualpipe_v", chunks=2),
    Case("seqpipe", "seqpipe", pieces=2),
    Case("seqpipe, 2 chunks", "seqpipe", chunks=2, pieces=2),
    Case("seqvpp", "seqvpp", chunks=2, pieces=2),
    Case("seqsmartvpp", "seqsmartvpp", chunks=2, pieces=2),
)


def measure(world: World, micros: int, unit: float, times: int) -> list[float]:
    """Seconds of the shortest step of each case, on the slowest rank."""
    return [_measured(world, case, micros, unit, times) for case in CASES]


def _measured(world: World, case: Case, micros: int, unit: float, times: int) -> float:
    import torch
    import torch.distributed as dist

    from launcher.parallel.fsdp.gather import Prefetch
    from launcher.runtime.torch_private import pipelining, reducing_stage

    # the stages of this rank
    places = case.places(world.size)
    part = unit / case.chunks / case.pieces
    count = micros * case.pieces
    one = (torch.empty(1, 4, device="meta", requires_grad=True),)
    assert dist.group.WORLD is not None
    stages = [
        reducing_stage.ReducingStage(
            _sleeper(part),
            s,
            len(places),
            torch.device("cpu"),
            group=dist.group.WORLD,
            takes=[one],
            sends=[one],
            reduce_each=False,
            reshard_each=False,
            carry=None,
            collect=lambda: None,
            order=NothingSharded(),
            prefetch=Prefetch((), ()),
            reductions=NothingSharded(),
        )
        for s, rank in enumerate(places)
        if rank == world.rank
    ]
    run = pipelining.runtime(stages, case.schedule(world.size, micros), count, lambda out, _: out[0].sum())
    for part_of in stages:
        if part_of.deferral is not None:
            part_of.submod.later = part_of.deferral.later

    # the first step warms up; a step takes as long as its slowest rank
    first = places[0] == world.rank
    last = places[-1] == world.rank
    best = math.inf
    for _ in range(times + 1):
        inputs = [(torch.zeros(1, 4),) for _ in range(count)] if first else None
        targets = [torch.zeros(1) for _ in range(count)] if last else None
        dist.barrier()
        began = time.perf_counter()
        pipelining.run(run, inputs, targets)
        took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        best = min(best, took.item())
    return best


class NothingSharded:
    """Stands in for ``GatherOrder`` and ``ReduceOrder`` of ``launcher/parallel/fsdp``: nothing is sharded."""

    forward = backward = last_backward = staticmethod(nullcontext)

    def flush(self) -> None:
        """Do nothing, because nothing is reduced."""


def _sleeper(part: float) -> Any:
    """Return a module that sleeps in its forward, and in the gradients of its input and of its parameter.

    The gradient of the parameter may be deferred.
    """
    import torch
    from torch import nn

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, there: float, back: float) -> torch.Tensor:
            time.sleep(there)
            ctx.back = back
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            time.sleep(ctx.back)
            return grad * 1.0, None, None

    class Product:
        def add(self) -> None:
            time.sleep(WEIGHT * part)

    class Weight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor, later: Any) -> torch.Tensor:
            ctx.later = later
            return weight * 1.0

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            queue = ctx.later()
            if queue is None:
                Product().add()
            else:
                queue.append(Product())
            return grad * 1.0, None

    class Sleeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))
            self.later: Any = lambda: None

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            y: torch.Tensor = Through.apply(x, FORWARD * part, INPUT * part)
            return (y + Weight.apply(self.weight, self.later),)

    return Sleeper()


def fitted(measured: list[float], ranks: int, micros: int, unit: float) -> float:
    """Return the overhead per action for which simulated times agree best, by squares of log ratios."""

    def off(overhead: float) -> float:
        found = (c.simulated(ranks, micros, unit, overhead).makespan for c in CASES)
        return sum(math.log(m / s) ** 2 for m, s in zip(measured, found, strict=True))

    low, high = 0.0, unit
    for _ in range(40):
        third = (high - low) / 3
        if off(low + third) < off(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2


def rows(measured: list[float], ranks: int, micros: int, unit: float, overhead: float) -> Iterator[str]:
    head = f"{'schedule':<20}{'stages':>7}{'pieces':>7}{'ideal ms':>10}{'simulated':>10}"
    yield f"{head}{'measured':>10}{'ratio':>7}{'bubble':>8}{'held':>6}"
    for case, seconds in zip(CASES, measured, strict=True):
        ideal = case.simulated(ranks, micros, unit, 0.0)
        t = case.simulated(ranks, micros, unit, overhead)
        held = max(ideal.peak) / case.chunks / case.pieces
        ratio = seconds / t.makespan
        yield (
            f"{case.name:<20}{ranks * case.chunks:>7}{case.pieces:>7}{ideal.makespan * 1e3:>10.1f}"
            f"{t.makespan * 1e3:>10.1f}{seconds * 1e3:>10.1f}{ratio:>7.3f}{ideal.bubble:>8.1%}{held:>6.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--unit", type=float, default=0.03, help="s of a micro batch's forward on one rank")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--micros", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4)
    most = "fail when simulated and measured differ by more"
    parser.add_argument("--tolerance", type=float, default=0.1, help=most)
    args = parser.parse_args()

    # measure, and simulate with the overhead that fits best
    ranks, micros, unit = args.ranks, args.micros, args.unit
    measured = run_ranks(partial(measure, micros=micros, unit=unit, times=args.times), ranks)[0]
    overhead = fitted(measured, ranks, micros, unit)
    for row in rows(measured, ranks, micros, unit, overhead=overhead):
        print(row)

    # the largest difference
    found = [c.simulated(ranks, micros, unit, overhead).makespan for c in CASES]
    worst = max(abs(m / s - 1) for m, s in zip(measured, found, strict=True))
    print(f"overhead {overhead * 1e3:.2f} ms an action, fitted over all rows; largest difference {worst:.1%}")
    shares = "as shares of one rank's part of the model"
    print(f"held: micro batches of activations on the rank that holds most, {shares}")
    if worst > args.tolerance:
        raise SystemExit(f"more than {args.tolerance * 100:g} % apart")


if __name__ == "__main__":
    with serving_from_here():
        main()
