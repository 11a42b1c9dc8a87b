"""Simulates a schedule on ranks that share the cores of their node equally."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from launcher.plan.schedule.schedules import Action, Schedule
from launcher.plan.schedule.simulate import Cost, Event, Timeline, needs, result, simulate

CLOSE = 1e-12
"""The fraction of an action's work that rounding may leave when the action is over."""


@dataclass(frozen=True)
class Cores:
    """The cores that ranks share.

    ``count``: cores of each node. ``ranks``: for each pipeline rank, (node, how many of its ranks run there).
    ``alone``: how many times faster a core is while the other cores of its node are idle.
    """

    count: int
    ranks: tuple[tuple[tuple[int, int], ...], ...]
    alone: float = 1.0

    @property
    def crowd(self) -> float:
        """How many times longer work takes if all ranks work at once; less than 1 if cores are idle."""
        return 1 / min((self.speed(n) for n in self.load(self.ranks).values()), default=1.0)

    def load(self, rows: Iterable[tuple[tuple[int, int], ...]]) -> Counter[int]:
        """Returns how many ranks work on each node while the ranks of these ``rows`` work."""
        counts = Counter[int]()
        for nodes in rows:
            counts.update(dict(nodes))
        return counts

    def speed(self, at_work: int) -> float:
        """Returns the speed of each of ``at_work`` ranks on a node; 1 is the speed with one rank a core.

        >>> [round(Cores(2, (), alone=1.5).speed(n), 2) for n in (1, 2, 4)]
        [1.5, 1.0, 0.5]
        """
        if at_work >= self.count:
            return self.count / at_work
        return 1 + (self.alone - 1) * (self.count - at_work) / (self.count - 1)


def simulate_shared(schedule: Schedule, place: tuple[int, ...], cost: Cost, cores: Cores) -> Timeline:
    """Returns the timeline as ``simulate`` does, with actions that share cores.

    Each of k running actions on the c cores of a node runs at ``Cores.speed``: c / k, or from 1 to
    ``Cores.alone`` if cores are idle. All ranks of one row run it at the same time, each on its own samples.
    ``busy`` counts the time that actions take on shared cores. Raises ``Deadlock``.
    """
    alone = simulate(schedule, place, cost)
    if cores.crowd == cores.alone == 1:
        return alone
    rows = _Clock(schedule, place, cost, cores).run()
    return replace(
        alone,
        events=tuple(e for row in rows for e in row),
        makespan=max((row[-1].end for row in rows if row), default=0.0),
        busy=tuple(sum(e.end - e.start for e in row) for row in rows),
    )


@dataclass
class _Clock:
    """The state of the simulation; ``remaining``: core seconds that each row's running action still needs."""

    schedule: Schedule
    place: tuple[int, ...]
    cost: Cost
    cores: Cores
    now: float = 0.0
    done: dict[Action, float] = field(default_factory=dict)
    remaining: dict[int, float] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    rows: list[list[Event]] = field(default_factory=list)

    def run(self) -> list[list[Event]]:
        """Advances from one moment to the next at which an action ends or a message arrives."""
        self.rows = [[] for _ in self.schedule]
        while True:
            arrivals = self._start()
            speed = {row: self._speed(row) for row in self.remaining}
            ends = {row: self.now + self.remaining[row] / speed[row] for row in self.remaining}
            moment = min([*ends.values(), *arrivals], default=None)
            if moment is None:
                return self.rows
            passed, self.now = moment - self.now, moment
            for row, rate in speed.items():
                self.remaining[row] -= passed * rate
            self._end()

    def _start(self) -> list[float]:
        """Starts the actions that can start; returns when the inputs of other actions will arrive."""
        arrivals = []
        for row in range(len(self.schedule)):
            at = self._arrival(row)
            if at is None:
                continue
            if at > self.now:
                arrivals.append(at)
                continue
            self.remaining[row], self.began[row] = self.cost.time(self._next(row)), self.now
        return arrivals

    def _next(self, row: int) -> Action:
        return self.schedule[row][len(self.rows[row])]

    def _arrival(self, row: int) -> float | None:
        """Returns when the next action of a row has its inputs.

        Returns ``None`` if that is not known yet, or if the row is running an action or is done.
        """
        if row in self.remaining or len(self.rows[row]) == len(self.schedule[row]):
            return None
        needed = needs(self._next(row), len(self.place))
        if any(n not in self.done for n in needed):
            return None
        return max((self.done[n] + self._way(n, row) for n in needed), default=0.0)

    def _way(self, needed: Action, row: int) -> float:
        return self.cost.transfer if self.place[needed.stage] != row else 0.0

    def _speed(self, row: int) -> float:
        """Returns the speed of the ranks of a row: that of the slowest, for which the others wait idle."""
        load = self.cores.load(self.cores.ranks[other] for other in self.remaining)
        return min(self.cores.speed(load[node]) for node, _ in self.cores.ranks[row])

    def _end(self) -> None:
        """Records the actions that are over."""
        for row in [*self._over()]:
            action = self._next(row)
            del self.remaining[row]
            self.rows[row].append(Event(row, self.began[row], self.now, action))
            self.done[result(action)] = self.now

    def _over(self) -> Iterator[int]:
        yield from (
            row for row, work in self.remaining.items() if work <= CLOSE * self.cost.time(self._next(row))
        )
