"""Predicts the seconds of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp

from launcher.plan.schedule.lanes import Lane, Part, Stretch
from launcher.plan.schedule.shared_cores import Cores, simulate_shared
from launcher.plan.schedule.simulate import Cost, Event, Timeline, simulate
from launcher.plan.time.speeds import Speeds, together
from launcher.plan.time.step_work import ActionWork, Sent, StepWork
from launcher.plan.values.grid import Grid


@dataclass(frozen=True)
class ActionSeconds:
    """The time of one action in seconds, in three parts: kernels, collectives over tp, and the host."""

    device: float
    sent: float
    host: float

    @property
    def seconds(self) -> float:
        return together(self.device + self.sent, self.host)

    @property
    def sent_seconds(self) -> float:
        """The seconds by which the action would be shorter without collectives."""
        return self.seconds - together(self.device, self.host)


@dataclass(frozen=True)
class StageSeconds:
    """The seconds of one micro batch, or a piece of one, on a stage.

    ``late``: the second half of the backward, if it is split.
    """

    forward: ActionSeconds
    backward: ActionSeconds
    late: ActionSeconds


@dataclass(frozen=True)
class TpShare:
    """The fraction (0 to 1) of the time of a stage's actions in which it waits for collectives over tp.

    ``first``: the fraction in the first half of a split backward; the second half sends nothing.
    """

    forward: float
    backward: float
    first: float


@dataclass(frozen=True)
class NetworkTraffic:
    """The weights and gradients that a pipeline rank sends in a step.

    ``exposed``: the seconds that it waits for them.
    """

    parts: tuple[Part, ...]
    exposed: float

    @property
    def seconds(self) -> float:
        """The seconds of all collectives, or of the wait for them, which may be longer."""
        return max(sum(p.seconds for p in self.parts), self.exposed)


def stage_seconds(work: StepWork, speeds: Speeds) -> dict[int, list[StageSeconds]]:
    """Returns the seconds of each piece on each stage; equal passes are computed once."""
    known: dict[tuple[ActionWork, bool], ActionSeconds] = {}

    def action(one: ActionWork, backward: bool) -> ActionSeconds:
        if (one, backward) not in known:
            known[one, backward] = load(one, work.grid, speeds, backward).action
        return known[one, backward]

    each = [
        StageSeconds(action(w.forward, False), action(w.backward, True), action(ActionWork(w.late), True))
        for w in work.stages
    ]
    n = work.pieces
    return {s: each[s * n : (s + 1) * n] for s in range(len(work.places))}


@dataclass(frozen=True)
class PartSeconds:
    """The seconds of an action in a form that adds up over parts.

    ``crossing``: the seconds that the host needs at least if pipelines cross nodes.
    """

    device: float
    sent: float
    host: float
    crossing: float = 0.0

    @property
    def action(self) -> ActionSeconds:
        return ActionSeconds(self.device, self.sent, max(self.host, self.crossing))


def load(one: ActionWork, grid: Grid, speeds: Speeds, backward: bool) -> PartSeconds:
    """Returns the load of one action on these devices."""
    costs = speeds.cluster.overheads
    sent = collectives(one.sent, grid.peers(0, "tp"), speeds)
    times = sum(n for *_, n in one.sent) if stages_cross_nodes(grid, speeds) else 0
    device, host = speeds.device_seconds(one.kernels, backward), speeds.host_seconds(one.kernels.kernels)
    if speeds.cores is not None:  # the core that computes also launches
        device, host = device + host, 0.0
    return PartSeconds(device, costs.exposed_tp * sent, host, times * grid["tp"] * costs.crossing_ms / 1e3)


def collectives(sent: Iterable[Sent], ranks: tuple[int, ...], speeds: Speeds) -> float:
    """Returns the seconds of all collectives in ``sent`` over ``ranks``, one after the other."""
    return sum(n * speeds.collective_seconds(kind, nbytes, ranks) for kind, nbytes, n in sent)


def cost(work: StepWork, seconds: dict[int, list[StageSeconds]], speeds: Speeds) -> Cost:
    """Returns the cost for the simulation of schedules, in seconds."""
    slot = speeds.cluster.overheads.slot_ms / 1e3
    each = [one for stage in seconds.values() for one in stage]
    return Cost(
        forward=tuple(s.forward.seconds + slot for s in each),
        backward=tuple(s.backward.seconds + slot for s in each),
        activation=tuple(w.saved for w in work.stages),
        transfer=max(transfers(work, speeds), default=0.0),
        weight=tuple(s.late.seconds for s in each),
        waits=tuple(w.waits for w in work.stages),
        pieces=work.pieces,
    )


def tp_shares(seconds: dict[int, list[StageSeconds]], speeds: Speeds) -> tuple[TpShare, ...]:
    """Returns one share for each stage and piece, stage by stage."""
    slot = speeds.cluster.overheads.slot_ms / 1e3

    def share(a: ActionSeconds, late: float = 0.0) -> float:
        return a.sent_seconds / (a.seconds + slot - late) if a.sent_seconds else 0.0

    each = (one for stage in seconds.values() for one in stage)
    return tuple(
        TpShare(share(s.forward), share(s.backward), share(s.backward, s.late.seconds)) for s in each
    )


def shared_cores(work: StepWork, speeds: Speeds) -> Cores | None:
    """Returns which ranks share the cores of each node; ``None`` if ranks have devices."""
    if speeds.cores is None:
        return None
    rows = (work.grid.ranks(pp=pp) for pp in range(work.grid["pp"]))
    nodes = (Counter(rank // speeds.per_node for rank in ranks) for ranks in rows)
    alone = speeds.cluster.kernels.alone
    return Cores(speeds.cores, tuple(tuple(sorted(n.items())) for n in nodes), alone)


def transfers(work: StepWork, speeds: Speeds) -> tuple[float, ...]:
    """Returns the seconds of the message of one piece from each stage to the next."""
    firsts = [work.grid.ranks(pp=pp)[0] for pp in range(work.grid["pp"])]
    at = [firsts[pp] for pp in work.places]
    return tuple(
        speeds.message_seconds(nbytes // work.pieces, at[s], at[s + 1])
        for s, nbytes in enumerate(work.crossings)
    )


def stages_cross_nodes(grid: Grid, speeds: Speeds) -> bool:
    """Returns true if the stages of a pipeline are on several nodes."""
    return grid["pp"] > 1 and grid.size > speeds.per_node


def network(work: StepWork, pp: int, busy: float, speeds: Speeds, crowd: float) -> NetworkTraffic:
    """Returns what a pipeline rank sends of weights and gradients.

    Args:
        work: the work of a step.
        pp: the pipeline rank.
        busy: its computation in seconds; communication that overlaps with it costs nothing.
        speeds: the speeds of the cluster.
        crowd: the slowdown when all ranks work at the same time (1: none).
    """
    grid, rank = work.grid, work.ranks[pp]
    first = grid.ranks(pp=pp)[0]
    shards, copies = grid.peers(first, "dp_shard"), grid.peers(first, "dp_replicate", "dp_shard")
    if work.replicated:
        copies = grid.peers(first, "dp_replicate")
    share = tuple(_parts(rank.share, shards, speeds, crowd))
    same = tuple(_parts(rank.same, copies, speeds, crowd))
    tied = tuple(_parts(rank.tied, grid.peers(first, "pp"), speeds, crowd, of=" of tied weights"))

    costs = speeds.cluster.overheads
    shared, summed = sum(p.seconds for p in share), sum(p.seconds for p in same + tied)
    waited = costs.exposed * shared + costs.exposed_sums * summed
    return NetworkTraffic(share + same + tied, max(waited, shared + summed - busy))


def _parts(
    sent: tuple[Sent, ...], ranks: tuple[int, ...], speeds: Speeds, crowd: float, of: str = ""
) -> Iterator[Part]:
    """Yields one part per kind of collective, without kinds that take no time because a rank is alone."""
    for kind in dict.fromkeys(kind for kind, *_ in sent):
        here = [s for s in sent if s[0] == kind]
        seconds = collectives(here, ranks, speeds) * _slowdown(ranks, speeds, crowd)
        if seconds:
            yield Part(kind + of, sum(n for *_, n in here), sum(b * n for _, b, n in here), seconds)


def _slowdown(ranks: tuple[int, ...], speeds: Speeds, crowd: float) -> float:
    """Returns the slowdown of a collective on shared cores while other groups run theirs.

    The load of its own ranks is already part of its time.
    """
    if speeds.cores is None:
        return 1.0
    own = max(Counter(rank // speeds.per_node for rank in ranks).values()) / speeds.cores
    return max(1.0, crowd / max(1.0, own))


def lanes(
    timeline: Timeline, shares: Sequence[TpShare], networks: Sequence[NetworkTraffic]
) -> tuple[Lane, ...]:
    """Returns the lanes that are not empty.

    ``shares``: one per stage and piece, stage by stage; ``networks``: one per pipeline rank.
    """
    label = "gradients and weights, hidden and waited for"
    all_lanes = (
        Lane("tp", "collectives over tp", tuple(_over_tp(timeline, shares))),
        Lane("data-parallel", label, tuple(_of_weights(timeline, networks))),
    )
    return tuple(lane for lane in all_lanes if lane.stretches)


def tp_seconds(e: Event, pieces: int, shares: Sequence[TpShare]) -> float:
    """Returns how many seconds of an action are spent in collectives over tp."""
    share = shares[e.action.stage * pieces + e.action.micro % pieces]
    of = {"F": share.forward, "B": share.backward, "I": share.first, "W": 0.0}
    return (e.end - e.start) * of[e.action.kind]


def _over_tp(timeline: Timeline, shares: Sequence[TpShare]) -> Iterator[Stretch]:
    """Yields the collectives over tp of each action.

    Only their duration is predicted, not their start, so they are drawn at the end of their action.
    """
    for e in timeline.events:
        seconds = tp_seconds(e, timeline.pieces, shares)
        if seconds:
            yield Stretch(e.rank, e.end - seconds, e.end, f"{e.action}: collectives over tp")


def _of_weights(timeline: Timeline, networks: Sequence[NetworkTraffic]) -> Iterator[Stretch]:
    """Yields one stretch per rank; when its parts are sent is not predicted.

    The part that the rank waits for is drawn after the schedule, the rest before its end.
    """
    for rank, sent in enumerate(networks):
        end = timeline.makespan + sent.exposed
        if sent.seconds:
            yield Stretch(rank, max(0.0, end - sent.seconds), end, "gradients and weights", sent.parts)


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
    fraction of the devices' peak. ``memory``: the bytes of the plan on the fullest device; ``needs``:
    ``memory`` plus the overhead of the allocator. ``timeline``: the schedule in seconds. ``shares``: the
    collectives over tp, one per stage and piece. ``networks``: weights and gradients, one per pipeline rank.
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
    networks: tuple[NetworkTraffic, ...]

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The collectives to draw next to the actions of ``timeline``."""
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
    step_seconds = together + more
    return Prediction(
        cluster=speeds.cluster.name or "the cluster",
        seconds=step_seconds,
        terms=terms,
        samples=work.samples,
        tokens=work.tokens,
        devices=work.grid.size,
        mfu=work.flops / (step_seconds * speeds.peak * work.grid.size),
        memory=work.memory,
        needs=needed,
        timeline=timeline,
        shares=shares,
        networks=networks,
    )


def _timeline(work: StepWork, cost: Cost, cores: Cores | None) -> tuple[Timeline, float]:
    """Returns the timeline, and the slowdown when all ranks work at the same time (1: none)."""
    if cores is None:
        return simulate(work.schedule, work.places, cost), 1.0
    return simulate_shared(work.schedule, work.places, cost, cores), cores.crowd


def _stalls(work: StepWork, speeds: Speeds) -> float:
    """Returns the seconds of stalls in messages between stages on several nodes; more devices stall more."""
    if not stages_cross_nodes(work.grid, speeds):
        return 0.0
    stages = work.grid["pp"]
    hops = (work.micros + stages - 1) * min(2, stages - 1)
    return hops * speeds.cluster.overheads.stall_ms / 1e3 * min(1.0, (work.grid.size / 512) ** 3)


def _near_limit(needed: int, speeds: Speeds) -> float:
    """Returns the fraction by which a nearly full device makes a step longer."""
    room = speeds.cluster.memory_gb
    if room is None:
        return 0.0
    below = (room - needed / GB) / WIDTH
    return speeds.cluster.overheads.near_limit / (1 + exp(min(50.0, below)))
