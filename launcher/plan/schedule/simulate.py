"""Start and end of every action of a schedule."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.plan.schedule.schedules import Action, Row, Schedule


@dataclass(frozen=True)
class Cost:
    """The cost of one micro batch on each virtual stage, in any unit of time.

    ``activation``: bytes kept for the backward. ``transfer``: the time from one rank to another. If a micro
    batch passes in ``pieces``, each stage has one entry per piece. If a backward is split into I and W,
    ``weight`` is the time of W and ``waits`` are the bytes that are kept for it; if they are empty, W takes
    half of the time and all bytes are kept.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    activation: tuple[int, ...]
    transfer: float = 0.0
    weight: tuple[float, ...] = ()
    waits: tuple[int, ...] = ()
    pieces: int = 1

    def time(self, a: Action) -> float:
        """Returns the duration of ``a``."""
        at = self.at(a)
        if a.kind == "F":
            return self.forward[at]
        if a.kind == "B":
            return self.backward[at]
        later = self.weight[at] if self.weight else self.backward[at] / 2
        return later if a.kind == "W" else self.backward[at] - later

    def kept(self, a: Action) -> int:
        """Returns by how many bytes ``a`` changes the activations that are kept."""
        at = self.at(a)
        activation = self.activation[at]
        waits = self.waits[at] if self.waits else activation
        return {"F": activation, "B": -activation, "I": waits - activation, "W": -waits}[a.kind]

    def at(self, a: Action) -> int:
        """Returns the index of an action's stage and piece in the tuples."""
        return a.stage * self.pieces + a.micro % self.pieces


@dataclass(frozen=True)
class Event:
    """The run of ``action`` on ``rank``, from ``start`` to ``end``."""

    rank: int
    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule. ``events`` are sorted by rank, then by start; other tuples have one entry a rank.

    ``peak``: the most bytes of activations at once. ``in_flight``: the most micro batches between their
    first forward and last backward on the rank. ``messages``: the number of activations and gradients sent
    between different ranks; a plan counts them by tensors. With ``pieces``, the micro number of an action is
    micro batch x pieces + piece. ``transfer``: the time that each message takes.
    """

    events: tuple[Event, ...]
    makespan: float
    busy: tuple[float, ...]
    peak: tuple[int, ...]
    in_flight: tuple[int, ...]
    messages: int
    pieces: int = 1
    transfer: float = 0.0

    @property
    def sent(self) -> tuple[Event, ...]:
        """The messages as events, each with the rank that sends it and the action that produced it."""
        places = {e.action.stage: e.rank for e in self.events}
        place = tuple(places[s] for s in sorted(places))
        return tuple(
            Event(e.rank, e.end, e.end + self.transfer, e.action)
            for e in self.events
            if _sends(e.action, place)
        )

    @property
    def bubble(self) -> float:
        """The idle fraction of the makespan, as the mean over ranks: 0 to 1."""
        total = len(self.busy) * self.makespan
        return (total - sum(self.busy)) / total if total else 0.0


class Deadlock(ValueError):
    """The ranks of a schedule would wait for each other forever."""


def simulate(schedule: Schedule, place: tuple[int, ...], cost: Cost) -> Timeline:
    """Starts each action as soon as its rank is free and its inputs have arrived.

    ``place``: the rank of each stage. Sending takes no time of the sender. Raises ``Deadlock``.
    """
    rows = _run(schedule, place, cost)
    return Timeline(
        events=tuple(e for row in rows for e in row),
        makespan=max((row[-1].end for row in rows if row), default=0.0),
        busy=tuple(sum(cost.time(a) for a in row) for row in schedule),
        peak=tuple(_peak(row, cost) for row in schedule),
        in_flight=tuple(_in_flight(row, cost.pieces) for row in schedule),
        messages=sum(_sends(a, place) for row in schedule for a in row),
        pieces=cost.pieces,
        transfer=cost.transfer,
    )


def _run(schedule: Schedule, place: tuple[int, ...], cost: Cost) -> list[list[Event]]:
    """Runs the ranks in turns: each continues until it must wait for an action, which then wakes it."""
    done: dict[Action, float] = {}
    waiting: dict[Action, list[int]] = defaultdict(list)
    rows: list[list[Event]] = [[] for _ in schedule]
    turns = list(range(len(schedule)))
    while turns:
        rank = turns.pop()
        row = rows[rank]
        while len(row) < len(schedule[rank]):
            action = schedule[rank][len(row)]
            needed = needs(action, len(place))

            # the missing action wakes the rank once it is done
            missing = next((n for n in needed if n not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break

            free = row[-1].end if row else 0.0
            arrivals = [done[n] + cost.transfer * (place[n.stage] != rank) for n in needed]
            start = max([free, *arrivals])
            row.append(Event(rank, start, start + cost.time(action), action))
            done[result(action)] = row[-1].end
            turns += waiting.pop(result(action), [])
    if waiting:
        raise Deadlock(_stuck(schedule, rows, waiting))
    return rows


def result(a: Action) -> Action:
    """Returns the action that others wait for: I computes the same gradient as B."""
    return Action(a.stage, "B", a.micro) if a.kind == "I" else a


def needs(a: Action, stages: int) -> tuple[Action, ...]:
    """Returns the actions that must be done before ``a``, in the form of ``result``."""
    if a.kind == "F":
        return (Action(a.stage - 1, "F", a.micro),) if a.stage else ()
    if a.kind == "W":
        return (Action(a.stage, "B", a.micro),)
    own = Action(a.stage, "F", a.micro)
    return (own,) if a.stage == stages - 1 else (own, Action(a.stage + 1, "B", a.micro))


def _stuck(schedule: Schedule, rows: list[list[Event]], waiting: dict[Action, list[int]]) -> str:
    results = {result(a) for row in schedule for a in row}
    reasons: dict[int, str] = {}
    for needed, ranks in waiting.items():
        nobody = "" if needed in results else ", which no rank runs"
        reasons |= dict.fromkeys(ranks, f"{needed}{nobody}")
    lines = [f"rank {r} at {schedule[r][len(rows[r])]} waits for {reasons[r]}" for r in sorted(reasons)]
    return f"the schedule deadlocks: {'; '.join(lines)}"


def _peak(row: Row, cost: Cost) -> int:
    """Returns the most bytes of activations at once.

    They exist from the start of a forward to the end of its backward (of W if split).
    """
    now = most = 0
    for a in row:
        now += cost.kept(a)
        most = max(most, now)
    return most


def _in_flight(row: Row, pieces: int) -> int:
    in_flight: Counter[int] = Counter()
    most = 0
    for a in row:
        micro = a.micro // pieces
        in_flight[micro] += {"F": 1, "I": 0}.get(a.kind, -1)
        if not in_flight[micro]:
            del in_flight[micro]
        most = max(most, len(in_flight))
    return most


def _sends(a: Action, place: tuple[int, ...]) -> bool:
    to = a.stage + (1 if a.kind == "F" else -1)
    return a.kind != "W" and 0 <= to < len(place) and place[to] != place[a.stage]


KINDS = "FBIW"


@dataclass(frozen=True)
class TopologicalOrder:
    """The actions of a schedule in topological order.

    ``steps`` has for each action the index of its time in ``_times``, the index of the action before it on
    its rank, the index of the action whose result it takes, and whether that comes from another rank. An
    index of -1 means that there is none.
    """

    steps: tuple[tuple[int, int, int, bool], ...]
    stages: int
    pieces: int


def order(schedule: Schedule, place: tuple[int, ...], pieces: int = 1) -> TopologicalOrder:
    """Returns the order of a schedule, which must not deadlock; ``place``: the rank of each stage."""
    ready: dict[tuple[int, str, int], int] = {}
    steps: list[tuple[int, int, int, bool]] = []
    at, last = [0] * len(schedule), [-1] * len(schedule)
    moving = True
    while moving:
        moving = False
        for rank, row in enumerate(schedule):
            while at[rank] < len(row):
                action = row[at[rank]]
                source = _source(action, len(place))
                if source is not None and source not in ready:
                    break
                taken = -1 if source is None else ready[source]
                far = source is not None and place[source[0]] != rank
                steps.append((_time(action, len(place), pieces), last[rank], taken, far))
                last[rank] = len(steps) - 1
                ready[action] = last[rank]
                if action.kind == "I":  # passes on the same gradient as a full backward
                    ready[action.stage, "B", action.micro] = last[rank]
                at[rank] += 1
                moving = True
    assert len(steps) == sum(map(len, schedule)), "the schedule deadlocks"
    return TopologicalOrder(tuple(steps), len(place), pieces)


def _source(a: Action, stages: int) -> tuple[int, str, int] | None:
    """Returns the action of another stage whose result ``a`` takes, or ``None``.

    A backward also needs its own forward, which always precedes it on the same rank.
    """
    if a.kind == "F":
        return (a.stage - 1, "F", a.micro) if a.stage else None
    if a.kind == "W" or a.stage == stages - 1:
        return None
    return (a.stage + 1, "B", a.micro)


def _time(a: Action, stages: int, pieces: int) -> int:
    return (KINDS.index(a.kind) * stages + a.stage) * pieces + a.micro % pieces


def makespan(order: TopologicalOrder, cost: Cost) -> float:
    """Returns the same makespan as ``simulate``."""
    times = _times(order, cost)
    transfer = cost.transfer
    ends = [0.0] * (len(order.steps) + 1)  # index -1 reads the last one, which stays 0
    for i, (time, before, taken, far) in enumerate(order.steps):
        start = ends[before]
        arrival = ends[taken] + transfer if far else ends[taken]
        ends[i] = (start if start > arrival else arrival) + times[time]
    return max(ends)


def _times(order: TopologicalOrder, cost: Cost) -> Sequence[float]:
    later = cost.weight or tuple(b / 2 for b in cost.backward)
    inputs = tuple(b - w for b, w in zip(cost.backward, later, strict=True))
    return (*cost.forward, *cost.backward, *inputs, *later)
