"""The seconds of each stage's actions, and the network traffic beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from launcher.plan.prediction.speeds import Speeds, together
from launcher.plan.prediction.step_work import Pass, Sent, StepWork
from launcher.plan.schedule.lanes import Part
from launcher.plan.schedule.shared_cores import Cores
from launcher.plan.schedule.simulate import Cost
from launcher.plan.values.grid import Grid


@dataclass(frozen=True)
class Action:
    """The seconds of one action: of its kernels, of its collectives over tp, and of the host."""

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

    forward: Action
    backward: Action
    late: Action


@dataclass(frozen=True)
class TpShare:
    """The share of its actions in which a stage waits for collectives over tp: 0 to 1.

    ``first``: that of the first half of a split backward; the second half sends nothing.
    """

    forward: float
    backward: float
    first: float


@dataclass(frozen=True)
class Network:
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
    known: dict[tuple[Pass, bool], Action] = {}

    def action(one: Pass, backward: bool) -> Action:
        if (one, backward) not in known:
            known[one, backward] = load(one, work.grid, speeds, backward).action
        return known[one, backward]

    each = [
        StageSeconds(action(w.forward, False), action(w.backward, True), action(Pass(w.late), True))
        for w in work.stages
    ]
    n = work.pieces
    return {s: each[s * n : (s + 1) * n] for s in range(len(work.places))}


@dataclass(frozen=True)
class Load:
    """The seconds of an action in a form that adds up over parts.

    ``crossing``: those of the host if pipelines cross nodes.
    """

    device: float
    sent: float
    host: float
    crossing: float = 0.0

    @property
    def action(self) -> Action:
        return Action(self.device, self.sent, max(self.host, self.crossing))


def load(one: Pass, grid: Grid, speeds: Speeds, backward: bool) -> Load:
    """Returns the load of one action on these devices."""
    costs = speeds.cluster.overheads
    sent = collectives(one.sent, grid.peers(0, "tp"), speeds)
    times = sum(n for *_, n in one.sent) if crosses_nodes(grid, speeds) else 0
    device, host = speeds.device_seconds(one.kernels, backward), speeds.host_seconds(one.kernels.kernels)
    if speeds.cores is not None:  # the core that computes also launches
        device, host = device + host, 0.0
    return Load(device, costs.exposed_tp * sent, host, times * grid["tp"] * costs.crossing_ms / 1e3)


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

    def share(a: Action, late: float = 0.0) -> float:
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


def crosses_nodes(grid: Grid, speeds: Speeds) -> bool:
    """Whether the stages of a pipeline are on several nodes."""
    return grid["pp"] > 1 and grid.size > speeds.per_node


def network(work: StepWork, pp: int, busy: float, speeds: Speeds, crowd: float) -> Network:
    """Returns what a pipeline rank sends of weights and gradients.

    Args:
        work: the work of a step.
        pp: the pipeline rank.
        busy: its seconds of computation, which hide the communication that it does not wait for.
        speeds: those of the cluster.
        crowd: how many times longer work takes that all ranks do at once.
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
    return Network(share + same + tied, max(waited, shared + summed - busy))


def _parts(
    sent: tuple[Sent, ...], ranks: tuple[int, ...], speeds: Speeds, crowd: float, of: str = ""
) -> Iterator[Part]:
    """Yields one part a kind of collective, without those that take no time because few ranks share them."""
    for kind in dict.fromkeys(kind for kind, *_ in sent):
        here = [s for s in sent if s[0] == kind]
        seconds = collectives(here, ranks, speeds) * _beside_others(ranks, speeds, crowd)
        if seconds:
            yield Part(kind + of, sum(n for *_, n in here), sum(b * n for _, b, n in here), seconds)


def _beside_others(ranks: tuple[int, ...], speeds: Speeds, crowd: float) -> float:
    """Returns how many times longer a collective takes on shared cores while other groups run theirs.

    The share of the cores that its own ranks on a node take is already in its seconds.
    """
    if speeds.cores is None:
        return 1.0
    own = max(Counter(rank // speeds.per_node for rank in ranks).values()) / speeds.cores
    return max(1.0, crowd / max(1.0, own))
