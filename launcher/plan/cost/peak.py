"""What a rank holds at the fullest moment of a training step: its schedule is walked through by segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from launcher.plan.schedule.actions import Action, Row
from launcher.plan.values.facts import Segment


@dataclass(frozen=True)
class Gather:
    """Bytes of one FSDP2 group: ``whole`` weights and their ``grads``.

    ``scattered`` is what is scattered of them, ``shard`` what is kept of that. It is needed from segment
    ``first`` to ``last`` of its stage.
    """

    whole: int
    grads: int
    scattered: int
    shard: int
    first: int
    last: int


@dataclass(frozen=True)
class Pass:
    """One micro batch, or a piece of one, through a stage; bytes.

    ``out`` is what the stage hands on, kept until its backward; ``loss`` what the loss keeps. ``sent`` goes
    to another rank, and ``returned``, the gradient of what came from one: both are kept until the step is
    over. ``received`` comes from another rank and is kept until its backward, ``answer`` is the gradient
    that comes for what it hands on: none where torch has buffers for them all along.
    """

    segments: tuple[Segment, ...]
    out: int
    loss: int
    sent: int = 0
    returned: int = 0
    received: int = 0
    answer: int = 0

    @property
    def passed(self) -> int:
        """What is let go of once its backward is over."""
        return self.out + self.received + self.answer


@dataclass(frozen=True)
class StageLoad:
    """One stage as a load of memory; bytes. ``passes``: one, or one a piece, all with the same segments.

    ``own``: gradients of whole parameters by segment, ``repeated_modules``: their copies in half precision.
    ``buffers`` is what torch receives into, for all micro batches at once.
    """

    passes: tuple[Pass, ...]
    gathers: tuple[Gather, ...]
    own: tuple[int, ...]
    repeated_modules: int
    buffers: int

    @property
    def whole(self) -> int:
        """All gradients, before they are scattered."""
        return sum(self.own) + sum(g.grads for g in self.gathers)


@dataclass(frozen=True)
class Moment:
    """Bytes: ``grads`` as they are kept, ``gathered`` weights and gradients of shards as a whole.

    ``activations`` are the rest.
    """

    grads: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        return self.grads + self.gathered + self.activations

    def __add__(self, other: Moment) -> Moment:
        return Moment(
            self.grads + other.grads, self.gathered + other.gathered, self.activations + other.activations
        )

    def __sub__(self, other: Moment) -> Moment:
        return Moment(
            self.grads - other.grads, self.gathered - other.gathered, self.activations - other.activations
        )


@dataclass(frozen=True)
class Habits:
    """``again`` is level3, ``each`` level2 or level3; ``early``: level1 scatters in its last backward.

    ``copied``: bytes of the gradients that one all-reduce sums at the end, side by side in a copy.
    """

    again: bool
    each: bool
    early: bool
    copied: int


@dataclass(frozen=True)
class Level:
    """The fullest moment while something goes on, and what is held once it is over."""

    most: Moment
    after: Moment


def fullest(row: Row, loads: Mapping[int, StageLoad], habits: Habits) -> Moment:
    """Of all moments of a step on one rank; ``loads`` by stage."""
    return max((level.most for level in levels(row, loads, habits)), key=lambda m: m.total)


def levels(row: Row, loads: Mapping[int, StageLoad], habits: Habits) -> Iterator[Level]:
    """Before the first action, of each action, and after the last one."""
    return _Walk(loads, habits).levels(row)


@dataclass
class _Walk:
    loads: Mapping[int, StageLoad]
    habits: Habits
    grads: int = 0
    gathered: int = 0
    activations: int = 0
    reduced: set[tuple[int, int]] = field(default_factory=set)
    unreduced: set[tuple[int, int]] = field(default_factory=set)
    summed: set[tuple[int, int]] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    dropped: set[tuple[int, int]] = field(default_factory=set)
    lingering: int = 0
    last: bool = False
    known: dict[Hashable, tuple[Moment, Moment, int]] = field(default_factory=dict)

    def now(self, *, gathered: int = 0, activations: int = 0) -> Moment:
        return Moment(self.grads, self.gathered + gathered, self.activations + activations)

    def levels(self, row: Row) -> Iterator[Level]:
        """Before the first action, of each action, and after the last one."""
        self.activations += sum(load.buffers for load in self.loads.values())
        self.gathered += sum(load.repeated_modules for load in self.loads.values())
        if not self.habits.again:
            self.gathered += sum(g.whole for load in self.loads.values() for g in load.gathers)
        left = Counter(a.stage for a in row if a.kind in "BW")
        yield Level(self.now(), self.now())
        for a in row:
            self.last = left[a.stage] == 1
            left[a.stage] -= a.kind in "BW"
            yield self._level(a, over=not left[a.stage] and a.kind != "F")
        yield Level(self.now(activations=self.habits.copied), self.now())

    def _level(self, a: Action, over: bool) -> Level:
        """Of one action: what an equal one had that found the same; ``over``: it is the last of its stage."""
        load = self.loads[a.stage]
        piece = a.micro % len(load.passes)
        there = (self._grown(), frozenset(self.unreduced))
        key = (a.kind, a.stage, piece, self.last, over, self.lingering, there)
        before = self.now()
        if key not in self.known:
            moments = [*self._act(a, load, piece), *(self._finish(a.stage) if over else ())]
            most, after = max(moments, key=lambda m: m.total), self.now()
            if (self._grown(), frozenset(self.unreduced)) == there:
                self.known[key] = most - before, after - before, self.lingering
            return Level(most, after)
        most, change, self.lingering = self.known[key]
        after = before + change
        self.grads, self.gathered, self.activations = after.grads, after.gathered, after.activations
        return Level(before + most, after)

    def _grown(self) -> tuple[int, ...]:
        """Nothing leaves these: of as many it is the same."""
        return tuple(len(grown) for grown in (self.reduced, self.summed, self.begun, self.dropped))

    def _act(self, a: Action, load: StageLoad, piece: int) -> Iterator[Moment]:
        one = load.passes[piece]
        if a.kind == "F":
            yield from self._forward(a.stage, load, one)
        elif a.kind == "B":
            yield from self._backward(a.stage, load, piece)
        elif a.kind == "W":
            yield from self._weights(a.stage, one)
        else:
            yield from self._inputs(a.stage, one)

    def _forward(self, stage: int, load: StageLoad, one: Pass) -> Iterator[Moment]:
        first = stage not in self.begun
        self.begun.add(stage)
        self.activations += one.received
        for i, segment in enumerate(one.segments):
            if first and not self.habits.again:  # received, and copied
                yield self.now(gathered=max((g.whole for g in load.gathers if g.first == i), default=0))
            self.activations += segment.saved
            yield self.now(gathered=self._open(load, i) + self._received(load, i))
        self.activations += one.out + one.sent + one.loss
        yield self.now(activations=one.loss)

    def _open(self, load: StageLoad, i: int) -> int:
        """level3: the weights in use at segment ``i``."""
        return sum(g.whole for g in load.gathers if g.first <= i <= g.last) if self.habits.again else 0

    def _ahead(self, load: StageLoad, i: int) -> int:
        """level3: those that the segments before ``i`` will use, gathered ahead in a backward."""
        before = [g for g in load.gathers if g.last < i] if self.habits.again else []
        return max(before, key=lambda g: g.last).whole if before else 0

    def _received(self, load: StageLoad, i: int) -> int:
        """level3: those that a forward has gathered last, once more: as they were received."""
        used = [g.whole for g in load.gathers if g.first <= i <= g.last] if self.habits.again else []
        return max(used, default=0)

    def _backward(self, stage: int, load: StageLoad, piece: int) -> Iterator[Moment]:
        one = load.passes[piece]
        yield self.now(activations=2 * one.loss)
        self.activations += one.answer - one.loss

        # its segments, the last one first
        for i in range(len(one.segments) - 1, -1, -1):
            segment = one.segments[i]
            here = self._open(load, i) + self._ahead(load, i)
            yield self.now(gathered=here, activations=self._work(stage, i, segment))
            self._sum(stage, i)
            self.activations += _owed(load, piece, i) - segment.saved + segment.left
            yield self.now(gathered=here)
            yield from self._close(stage, i, one)

        # what it handed on goes; gradients sent to another rank stay until the step is over
        self.activations += one.returned - one.passed - sum(s.left for s in one.segments)
        self.gathered -= self.lingering
        self.lingering = 0

    def _work(self, stage: int, i: int, segment: Segment) -> int:
        """What the backward of a segment needs besides, with gradients of weights where these are new."""
        groups = enumerate(self.loads[stage].gathers)
        new = (stage, i) not in self.summed or any(
            g.first == i and (stage, n) not in self.unreduced for n, g in groups
        )
        return max(segment.backward.work, segment.backward.summed) if new else segment.backward.work

    def _inputs(self, stage: int, one: Pass) -> Iterator[Moment]:
        """The first half of a backward: inputs of products stay saved, and the gradients of their outputs."""
        yield self.now(activations=2 * one.loss)
        self.activations += one.answer - one.loss
        for i in range(len(one.segments) - 1, -1, -1):
            segment = one.segments[i]
            at_once = bool(segment.backward.again)  # of what runs again nothing is put off
            work = self._work(stage, i, segment) if at_once else segment.backward.work
            yield self.now(activations=work)
            self._sum(stage, i)
            self.activations += segment.backward.kept - segment.saved
            yield self.now()
        self.activations += one.returned - one.passed
        yield self.now()

    def _weights(self, stage: int, one: Pass) -> Iterator[Moment]:
        """The second half: what has waited goes, one product after the other."""
        yield self.now()
        self.activations -= sum(s.backward.kept for s in one.segments)
        for i in range(len(one.segments) - 1, -1, -1):
            self._sum(stage, i)
        for i in range(len(one.segments) - 1, -1, -1):
            if self.habits.each:
                yield from self._close(stage, i, one)
        self.gathered -= self.lingering
        self.lingering = 0

    def _sum(self, stage: int, i: int) -> None:
        """Gradients appear: of whole parameters, and of groups whose first segment this is."""
        load = self.loads[stage]
        if (stage, i) not in self.summed:
            self.summed.add((stage, i))
            self.grads += load.own[i]
        for n, g in enumerate(load.gathers):
            if g.first == i and (stage, n) not in self.unreduced:
                self.unreduced.add((stage, n))
                self.gathered += g.grads

    def _close(self, stage: int, i: int, one: Pass) -> Iterator[Moment]:
        """Gradients are scattered, while that of what comes next is there already."""
        load = self.loads[stage]
        last = self.habits.early and self.last and not self.habits.each
        for n, g in enumerate(load.gathers):
            if g.first == i and last:
                self._drop(stage, n, g)
            if g.first == i and (self.habits.each or last):
                next_one = one.segments[i - 1].made if i else 0
                self.gathered -= self.lingering
                yield self._scatter(stage, n, g, ahead=self._ahead(load, i), grad=next_one)
                self.gathered += g.scattered  # FSDP2 lets go of it when the next group comes
                self.lingering = g.scattered

    def _scatter(self, stage: int, n: int, g: Gather, *, ahead: int = 0, grad: int = 0) -> Moment:
        """The moment before the whole gradients go."""
        held = self.now(gathered=g.scattered + g.shard + ahead, activations=grad)
        if (stage, n) in self.unreduced:
            self.unreduced.discard((stage, n))
            self.gathered -= g.grads
        if (stage, n) not in self.reduced:
            self.reduced.add((stage, n))
            self.grads += g.shard
        return held

    def _drop(self, stage: int, n: int, g: Gather) -> None:
        if (stage, n) not in self.dropped:
            self.dropped.add((stage, n))
            self.gathered -= g.whole

    def _finish(self, stage: int) -> Iterator[Moment]:
        """After the last backward of a stage: what is left is scattered, kept weights go, group by group."""
        for n, g in enumerate(self.loads[stage].gathers):
            if not self.habits.again:
                self._drop(stage, n, g)
            if not self.habits.each and (stage, n) not in self.reduced:
                yield self._scatter(stage, n, g)


def _owed(load: StageLoad, piece: int, i: int) -> int:
    """What the backward of segment ``i`` adds to the gradients that pieces owe to earlier ones.

    The last piece of a micro batch, the first to go backward, makes them for all that it has read; each
    other one uses its own up.
    """
    if piece == len(load.passes) - 1:
        return sum(p.segments[i].left for p in load.passes[:piece])
    return -load.passes[piece].segments[i].left
