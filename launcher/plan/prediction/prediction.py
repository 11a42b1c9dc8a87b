"""Predicts a step: its seconds, what they go to, and what comes of that in tokens and in model FLOPs."""

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
"""GB around a full device within which an allocator begins to free and to ask again."""


@dataclass(frozen=True)
class Term:
    """``seconds`` of a step that go to ``name`` on the rank that has most to do."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """``seconds`` of a step on ``cluster``, all ``terms`` together; ``mfu``: share of the devices' peak.

    ``samples`` and ``tokens`` of a step; ``memory``: bytes that the plan holds on the device that has most,
    ``needs``: those with what an allocator needs more; ``timeline``: of the schedule, in seconds.
    ``shares``: of collectives over tp, one a stage and piece; ``networks``: of weights and gradients, one a
    pipeline rank.
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
        """Collectives beside the actions of ``timeline``."""
        return lanes(self.timeline, self.shares, self.networks)


def predict(work: StepWork, speeds: Speeds) -> Prediction:
    """Of one step on these devices."""
    seconds = stage_seconds(work, speeds)
    timeline, crowd = _timeline(work, cost(work, seconds, speeds), shared_cores(work, speeds))
    ranks = range(work.grid["pp"])
    most = max(ranks, key=lambda pp: timeline.busy[pp])
    shares = tp_shares(seconds, speeds)
    sent = sum(tp_seconds(e, timeline.pieces, shares) for e in timeline.events if e.rank == most)

    # after the pipeline, what is not hidden behind it: all ranks are at it
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
    """Of the schedule, and how many times longer takes what all ranks do at once."""
    if cores is None:
        return simulate(work.schedule, work.places, cost), 1.0
    return simulate_shared(work.schedule, work.places, cost, cores), cores.crowd


def _stalls(work: StepWork, speeds: Speeds) -> float:
    """Hops between stages on several nodes wait besides, the more often the more devices there are."""
    if not crosses_nodes(work.grid, speeds):
        return 0.0
    stages = work.grid["pp"]
    hops = (work.micros + stages - 1) * min(2, stages - 1)
    return hops * speeds.cluster.overheads.stall_ms / 1e3 * min(1.0, (work.grid.size / 512) ** 3)


def _near_limit(needed: int, speeds: Speeds) -> float:
    """How many times longer a step is."""
    room = speeds.cluster.memory_gb
    if room is None:
        return 0.0
    below = (room - needed / GB) / WIDTH
    return speeds.cluster.overheads.near_limit / (1 + exp(min(50.0, below)))
