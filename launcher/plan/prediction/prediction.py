"""Predicts a step: its seconds, what they are spent on, and the resulting tokens and model FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import exp

from launcher.plan.prediction.lanes import lanes, tp_seconds
from launcher.plan.prediction.speeds import Speeds
from launcher.plan.prediction.step_seconds import (
    Network,
    TpShare,
    cost,
    crosses_nodes,
    network,
    shared_cores,
    stage_seconds,
    tp_shares,
)
from launcher.plan.prediction.step_work import StepWork
from launcher.plan.schedule.lanes import Lane
from launcher.plan.schedule.shared_cores import Cores, simulate_shared
from launcher.plan.schedule.simulate import Cost, Timeline, simulate

GB = 1 << 30
WIDTH = 1.5
"""The GB around the limit of a device within which an allocator begins to free and reallocate memory."""


@dataclass(frozen=True)
class Term:
    """The seconds of a step that the busiest rank spends on ``name``."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """The prediction of one step on ``cluster``.

    ``seconds`` is the sum of all ``terms``. ``samples`` and ``tokens`` are those of a step. ``mfu``: the
    share of the devices' peak. ``memory``: the bytes that the plan holds on the fullest device; ``needs``:
    the same with what an allocator needs in addition. ``timeline``: the schedule in seconds. ``shares``: the
    collectives over tp, one a stage and piece. ``networks``: weights and gradients, one a pipeline rank.
    """

    cluster: str
    seconds: float
    terms: tuple[Term, ...]
    samples: int
    tokens: int | None
    devices: int
    mfu: float
    memory: int
    needs: int
    timeline: Timeline
    shares: tuple[TpShare, ...]
    networks: tuple[Network, ...]

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The collectives to draw beside the actions of ``timeline``."""
        return lanes(self.timeline, self.shares, self.networks)


def predict(work: StepWork, speeds: Speeds) -> Prediction:
    """Predicts one step on the devices and links of ``speeds``."""
    seconds = stage_seconds(work, speeds)
    timeline, crowd = _timeline(work, cost(work, seconds, speeds), shared_cores(work, speeds))
    ranks = range(work.grid["pp"])
    most = max(ranks, key=lambda pp: timeline.busy[pp])
    shares = tp_shares(seconds, speeds)
    sent = sum(tp_seconds(e, timeline.pieces, shares) for e in timeline.events if e.rank == most)

    # after the pipeline comes what it does not hide; all ranks do that at the same time
    costs = speeds.cluster.overheads
    networks = tuple(network(work, pp, timeline.busy[pp], speeds, crowd) for pp in ranks)
    gradients = max(n.exposed for n in networks)
    optimizer = max(r.state for r in work.ranks) / speeds.memory * crowd
    others = costs.step_ms / 1e3 * crowd + _stalls(work, speeds)
    together = timeline.makespan + gradients + optimizer + others

    needed = int(work.memory * (1 + costs.fragments) + costs.reserve_gb * GB)
    more = together * _near_limit(needed, speeds)
    terms = (
        Term("kernels", timeline.busy[most] - sent),
        Term("collectives over tp", sent),
        Term("pipeline bubble", timeline.makespan - timeline.busy[most]),
        Term("gradients and weights on the network", gradients),
        Term("optimizer", optimizer),
        Term("overheads", others),
        Term("allocator near its limit", more),
    )
    whole = together + more
    return Prediction(
        cluster=speeds.cluster.name or "the cluster",
        seconds=whole,
        terms=terms,
        samples=work.samples,
        tokens=work.tokens,
        devices=work.grid.size,
        mfu=work.flops / (whole * speeds.peak * work.grid.size),
        memory=work.memory,
        needs=needed,
        timeline=timeline,
        shares=shares,
        networks=networks,
    )


def _timeline(work: StepWork, cost: Cost, cores: Cores | None) -> tuple[Timeline, float]:
    """Returns the timeline, and how many times longer work takes that all ranks do at once."""
    if cores is None:
        return simulate(work.schedule, work.places, cost), 1.0
    return simulate_shared(work.schedule, work.places, cost, cores), cores.crowd


def _stalls(work: StepWork, speeds: Speeds) -> float:
    """Returns the seconds of stalls in messages between stages on several nodes; more devices stall more."""
    if not crosses_nodes(work.grid, speeds):
        return 0.0
    stages = work.grid["pp"]
    hops = (work.micros + stages - 1) * min(2, stages - 1)
    return hops * speeds.cluster.overheads.stall_ms / 1e3 * min(1.0, (work.grid.size / 512) ** 3)


def _near_limit(needed: int, speeds: Speeds) -> float:
    """Returns the share by which a nearly full device makes a step longer."""
    room = speeds.cluster.memory_gb
    if room is None:
        return 0.0
    below = (room - needed / GB) / WIDTH
    return speeds.cluster.overheads.near_limit / (1 + exp(min(50.0, below)))
