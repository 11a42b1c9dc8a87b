"""Runs a schedule on paper where ranks share the cores of their node: what runs at once gets equal parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from launcher.plan.schedule.actions import Action, Schedule
from launcher.plan.schedule.simulate import Cost, Event, Timeline, needs, result, simulate

CLOSE = 1e-12
"""Of the work of an action: what rounding leaves of one that is over."""


@dataclass(frozen=True)
class Cores:
    """``count``: of each node. ``ranks``: of each pipeline rank, (node, how many do its row there).

    ``alone``: times as fast is a core while the others of its node rest.
    """

    count: int
    ranks: tuple[tuple[tuple[int, int], ...], ...]
    alone: float = 1.0

    @property
    def crowd(self) -> float:
        """How many times longer work takes that all ranks do at once; less than 1 where cores rest."""
        return 1 / min((self.speed(n) for n in self.load(self.ranks).values()), default=1.0)

    def load(self, rows: Iterable[tuple[tuple[int, int], ...]]) -> Counter[int]:
        """How many are at work on each node."""
        found = Counter[int]()
        for nodes in rows:
            found.update(dict(nodes))
        return found

    def speed(self, at_work: int) -> float:
        """Of each of so many on a node, of what it is where each core has one.

        >>> [round(Cores(2, (), alone=1.5).speed(n), 2) for n in (1, 2, 4)]
        [1.5, 1.0, 0.5]
        """
        if at_work >= self.count:
            return self.count / at_work
        return 1 + (self.alone - 1) * (self.count - at_work) / (self.count - 1)


def simulate_shared(schedule: Schedule, place: tuple[int, ...], cost: Cost, cores: Cores) -> Timeline:
    """As ``simulate``, where k running actions on c cores of a node each go on at ``Cores.speed``: c / k,
    and at 1 to ``Cores.alone`` where cores rest.

    The ranks that do one row do it at once, each on its own samples. ``busy`` of the timeline is as long as
    actions take so. Raises ``Deadlock``.
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
    """``left``: seconds of a core that the action at work on a row still takes."""

    schedule: Schedule
    place: tuple[int, ...]
    cost: Cost
    cores: Cores
    now: float = 0.0
    done: dict[Action, float] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    rows: list[list[Event]] = field(default_factory=list)

    def run(self) -> list[list[Event]]:
        """From one moment at which an action ends or a message arrives to the next."""
        self.rows = [[] for _ in self.schedule]
        while True:
            arrivals = self._start()
            speed = {row: self._speed(row) for row in self.left}
            ends = {row: self.now + self.left[row] / speed[row] for row in self.left}
            moment = min([*ends.values(), *arrivals], default=None)
            if moment is None:
                return self.rows
            passed, self.now = moment - self.now, moment
            for row, rate in speed.items():
                self.left[row] -= passed * rate
            self._end()

    def _start(self) -> list[float]:
        """Begin what can begin; when what comes for the others will have arrived."""
        arrivals = []
        for row in range(len(self.schedule)):
            at = self._arrival(row)
            if at is None:
                continue
            if at > self.now:
                arrivals.append(at)
                continue
            self.left[row], self.began[row] = self.cost.time(self._next(row)), self.now
        return arrivals

    def _next(self, row: int) -> Action:
        return self.schedule[row][len(self.rows[row])]

    def _arrival(self, row: int) -> float | None:
        """When the next action of a row has all that it needs; ``None``: nobody knows, or it is at work."""
        if row in self.left or len(self.rows[row]) == len(self.schedule[row]):
            return None
        needed = needs(self._next(row), len(self.place))
        if any(n not in self.done for n in needed):
            return None
        return max((self.done[n] + self._way(n, row) for n in needed), default=0.0)

    def _way(self, needed: Action, row: int) -> float:
        return self.cost.transfer if self.place[needed.stage] != row else 0.0

    def _speed(self, row: int) -> float:
        """Of each of the ranks of a row: the slowest holds up the others, which wait without working."""
        load = self.cores.load(self.cores.ranks[other] for other in self.left)
        return min(self.cores.speed(load[node]) for node, _ in self.cores.ranks[row])

    def _end(self) -> None:
        for row in [*self._over()]:
            action = self._next(row)
            del self.left[row]
            self.rows[row].append(Event(row, self.began[row], self.now, action))
            self.done[result(action)] = self.now

    def _over(self) -> Iterator[int]:
        yield from (row for row, left in self.left.items() if left <= CLOSE * self.cost.time(self._next(row)))
