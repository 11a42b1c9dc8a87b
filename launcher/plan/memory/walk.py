"""The memory of a rank at the fullest moment of a training step, computed by a walk through its schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from launcher.plan.schedule.schedules import Action, Row
from launcher.plan.values.model_graph import Segment


@dataclass(frozen=True)
class Gather:
    """The bytes of one FSDP2 group: ``full_weights`` and their gradients ``grads``, unsharded.

    ``scattered`` is the input of the reduce-scatter, ``shard`` what a rank keeps of its result. The group is
    needed from segment ``first`` to ``last`` of its stage.
    """

    full_weights: int
    grads: int
    scattered: int
    shard: int
    first: int
    last: int


@dataclass(frozen=True)
class PassBytes:
    """The bytes of one micro batch, or of a piece of one, in a stage.

    ``out`` is the stage's output that is kept until its backward; ``loss`` is what the loss keeps. ``sent``
    goes to another rank, and so does ``returned``, the gradient of a received input: both are kept until the
    end of the step. ``received`` comes from another rank and is kept until the backward; ``answer`` is the
    gradient that comes back for the output. Both are 0 if torch has buffers for them during the entire step.
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
        """The bytes that are freed when its backward is over."""
        return self.out + self.received + self.answer


@dataclass(frozen=True)
class StageLoad:
    """The memory that one stage needs, in bytes.

    ``passes``: one, or one per piece; all have the same segments. ``own``: gradients of unsharded parameters,
    by segment. ``half_copies``: half-precision copies of unsharded parameters. ``buffers``: torch's
    receive buffers for all micro batches.
    """

    passes: tuple[PassBytes, ...]
    gathers: tuple[Gather, ...]
    own: tuple[int, ...]
    half_copies: int
    buffers: int

    @property
    def full_grads(self) -> int:
        """The bytes of all full gradients, before they are scattered."""
        return sum(self.own) + sum(g.grads for g in self.gathers)


@dataclass(frozen=True)
class MemoryInUse:
    """The bytes in use at one moment.

    ``grads`` are gradients in the form in which they are kept, ``gathered`` the full tensors of sharded
    weights and their gradients, ``activations`` everything else.
    """

    grads: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        return self.grads + self.gathered + self.activations

    def __add__(self, other: MemoryInUse) -> MemoryInUse:
        return MemoryInUse(
            self.grads + other.grads, self.gathered + other.gathered, self.activations + other.activations
        )

    def __sub__(self, other: MemoryInUse) -> MemoryInUse:
        return MemoryInUse(
            self.grads - other.grads, self.gathered - other.gathered, self.activations - other.activations
        )


@dataclass(frozen=True)
class FsdpPolicy:
    """What FSDP2 does at the plan's ``optimizer_level``.

    ``regathers``: weights are gathered for each use (level3). ``reduces_each_backward``: gradients are
    reduced after each backward (level2 and level3). ``scatters_early``: level1 scatters during its last
    backward. ``copied``: bytes of the flat copy of gradients that the largest final all-reduce sums.
    """

    regathers: bool
    reduces_each_backward: bool
    scatters_early: bool
    copied: int


@dataclass(frozen=True)
class ActionMemory:
    """The fullest moment of an action (``most``), and the bytes in use at its end (``after``)."""

    most: MemoryInUse
    after: MemoryInUse


def fullest(row: Row, loads: Mapping[int, StageLoad], policy: FsdpPolicy) -> MemoryInUse:
    """Returns the fullest moment of a step on one rank; ``loads`` by stage."""
    return max((level.most for level in levels(row, loads, policy)), key=lambda m: m.total)


def levels(row: Row, loads: Mapping[int, StageLoad], policy: FsdpPolicy) -> Iterator[ActionMemory]:
    """Yields the memory before the first action, of each action, and after the last action."""
    return _Walk(loads, policy).levels(row)


@dataclass
class _Walk:
    """A walk through the actions of one rank: the bytes in use now, and what earlier actions have done."""

    loads: Mapping[int, StageLoad]
    policy: FsdpPolicy
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
    known: dict[Hashable, tuple[MemoryInUse, MemoryInUse, int]] = field(default_factory=dict)

    def now(self, *, gathered: int = 0, activations: int = 0) -> MemoryInUse:
        return MemoryInUse(self.grads, self.gathered + gathered, self.activations + activations)

    def levels(self, row: Row) -> Iterator[ActionMemory]:
        """Yields the memory before the first action, of each action, and after the last action."""
        self.activations += sum(load.buffers for load in self.loads.values())
        self.gathered += sum(load.half_copies for load in self.loads.values())
        if not self.policy.regathers:
            self.gathered += sum(g.full_weights for load in self.loads.values() for g in load.gathers)
        remaining = Counter(a.stage for a in row if a.kind in "BW")
        yield ActionMemory(self.now(), self.now())
        for a in row:
            self.last = remaining[a.stage] == 1
            remaining[a.stage] -= a.kind in "BW"
            yield self._level(a, over=not remaining[a.stage] and a.kind != "F")
        yield ActionMemory(self.now(activations=self.policy.copied), self.now())

    def _level(self, a: Action, over: bool) -> ActionMemory:
        """Returns the memory of one action, copied from an equal action in the same state if there was one.

        ``over``: it is the last action of its stage.
        """
        load = self.loads[a.stage]
        piece = a.micro % len(load.passes)
        state = (self._grown(), frozenset(self.unreduced))
        key = (a.kind, a.stage, piece, self.last, over, self.lingering, state)
        before = self.now()
        if key not in self.known:
            moments = [*self._act(a, load, piece), *(self._finish(a.stage) if over else ())]
            most, after = max(moments, key=lambda m: m.total), self.now()
            if (self._grown(), frozenset(self.unreduced)) == state:
                self.known[key] = most - before, after - before, self.lingering
            return ActionMemory(most, after)
        most, change, self.lingering = self.known[key]
        after = before + change
        self.grads, self.gathered, self.activations = after.grads, after.gathered, after.activations
        return ActionMemory(before + most, after)

    def _grown(self) -> tuple[int, ...]:
        """Returns the sizes of the sets that only grow: equal sizes mean equal sets."""
        return tuple(len(grown) for grown in (self.reduced, self.summed, self.begun, self.dropped))

    def _act(self, a: Action, load: StageLoad, piece: int) -> Iterator[MemoryInUse]:
        one = load.passes[piece]
        if a.kind == "F":
            yield from self._forward(a.stage, load, one)
        elif a.kind == "B":
            yield from self._backward(a.stage, load, piece)
        elif a.kind == "W":
            yield from self._weights(a.stage, one)
        else:
            yield from self._inputs(a.stage, one)

    def _forward(self, stage: int, load: StageLoad, one: PassBytes) -> Iterator[MemoryInUse]:
        first = stage not in self.begun
        self.begun.add(stage)
        self.activations += one.received
        for i, segment in enumerate(one.segments):
            if first and not self.policy.regathers:  # the all-gather's buffer and the copied weights coexist
                yield self.now(
                    gathered=max((g.full_weights for g in load.gathers if g.first == i), default=0)
                )
            self.activations += segment.saved
            yield self.now(gathered=self._open(load, i) + self._received(load, i))
        self.activations += one.out + one.sent + one.loss
        yield self.now(activations=one.loss)

    def _open(self, load: StageLoad, i: int) -> int:
        """Returns the bytes of the weights that level3 uses at segment ``i``; 0 at other levels."""
        return (
            sum(g.full_weights for g in load.gathers if g.first <= i <= g.last)
            if self.policy.regathers
            else 0
        )

    def _ahead(self, load: StageLoad, i: int) -> int:
        """Returns the bytes that level3 prefetches in a backward; 0 at other levels.

        It prefetches the group that the segments before ``i`` need next.
        """
        before = [g for g in load.gathers if g.last < i] if self.policy.regathers else []
        return max(before, key=lambda g: g.last).full_weights if before else 0

    def _received(self, load: StageLoad, i: int) -> int:
        """Returns the bytes of the receive buffer of the last group that a level3 forward has gathered."""
        used = (
            [g.full_weights for g in load.gathers if g.first <= i <= g.last] if self.policy.regathers else []
        )
        return max(used, default=0)

    def _backward(self, stage: int, load: StageLoad, piece: int) -> Iterator[MemoryInUse]:
        one = load.passes[piece]
        yield self.now(activations=2 * one.loss)
        self.activations += one.answer - one.loss

        # the segments, the last one first
        for i in range(len(one.segments) - 1, -1, -1):
            segment = one.segments[i]
            here = self._open(load, i) + self._ahead(load, i)
            yield self.now(gathered=here, activations=self._work(stage, i, segment))
            self._sum(stage, i)
            self.activations += _owed(load, piece, i) - segment.saved + segment.left
            yield self.now(gathered=here)
            yield from self._close(stage, i, one)

        # the output is freed; gradients sent to another rank stay until the end of the step
        self.activations += one.returned - one.passed - sum(s.left for s in one.segments)
        self.gathered -= self.lingering
        self.lingering = 0

    def _work(self, stage: int, i: int, segment: Segment) -> int:
        """Returns the bytes that the backward of a segment adds; new weight gradients are included."""
        groups = enumerate(self.loads[stage].gathers)
        new = (stage, i) not in self.summed or any(
            g.first == i and (stage, n) not in self.unreduced for n, g in groups
        )
        return max(segment.backward.work, segment.backward.summed) if new else segment.backward.work

    def _inputs(self, stage: int, one: PassBytes) -> Iterator[MemoryInUse]:
        """Yields the first half of a backward: inputs and output gradients of matrix products stay saved."""
        yield self.now(activations=2 * one.loss)
        self.activations += one.answer - one.loss
        for i in range(len(one.segments) - 1, -1, -1):
            segment = one.segments[i]
            at_once = bool(segment.backward.again)  # a segment that runs again defers nothing
            work = self._work(stage, i, segment) if at_once else segment.backward.work
            yield self.now(activations=work)
            self._sum(stage, i)
            self.activations += segment.backward.kept - segment.saved
            yield self.now()
        self.activations += one.returned - one.passed
        yield self.now()

    def _weights(self, stage: int, one: PassBytes) -> Iterator[MemoryInUse]:
        """Yields the second half of a backward, which frees what was kept for it, product by product."""
        yield self.now()
        self.activations -= sum(s.backward.kept for s in one.segments)
        for i in range(len(one.segments) - 1, -1, -1):
            self._sum(stage, i)
        for i in range(len(one.segments) - 1, -1, -1):
            if self.policy.reduces_each_backward:
                yield from self._close(stage, i, one)
        self.gathered -= self.lingering
        self.lingering = 0

    def _sum(self, stage: int, i: int) -> None:
        """Adds the gradients of unsharded parameters, and of groups whose first segment this is."""
        load = self.loads[stage]
        if (stage, i) not in self.summed:
            self.summed.add((stage, i))
            self.grads += load.own[i]
        for n, g in enumerate(load.gathers):
            if g.first == i and (stage, n) not in self.unreduced:
                self.unreduced.add((stage, n))
                self.gathered += g.grads

    def _close(self, stage: int, i: int, one: PassBytes) -> Iterator[MemoryInUse]:
        """Scatters the gradients of segment ``i``, while the gradient for the next segment already exists."""
        load = self.loads[stage]
        last = self.policy.scatters_early and self.last and not self.policy.reduces_each_backward
        for n, g in enumerate(load.gathers):
            if g.first == i and last:
                self._drop(stage, n, g)
            if g.first == i and (self.policy.reduces_each_backward or last):
                next_one = one.segments[i - 1].made if i else 0
                self.gathered -= self.lingering
                yield self._scatter(stage, n, g, ahead=self._ahead(load, i), grad=next_one)
                self.gathered += g.scattered  # FSDP2 frees it when it scatters the next group
                self.lingering = g.scattered

    def _scatter(self, stage: int, n: int, g: Gather, *, ahead: int = 0, grad: int = 0) -> MemoryInUse:
        """Returns the moment before the full gradients are freed."""
        moment = self.now(gathered=g.scattered + g.shard + ahead, activations=grad)
        if (stage, n) in self.unreduced:
            self.unreduced.discard((stage, n))
            self.gathered -= g.grads
        if (stage, n) not in self.reduced:
            self.reduced.add((stage, n))
            self.grads += g.shard
        return moment

    def _drop(self, stage: int, n: int, g: Gather) -> None:
        if (stage, n) not in self.dropped:
            self.dropped.add((stage, n))
            self.gathered -= g.full_weights

    def _finish(self, stage: int) -> Iterator[MemoryInUse]:
        """Ends the last backward of a stage: scatters what is left and frees kept weights, group by group."""
        for n, g in enumerate(self.loads[stage].gathers):
            if not self.policy.regathers:
                self._drop(stage, n, g)
            if not self.policy.reduces_each_backward and (stage, n) not in self.reduced:
                yield self._scatter(stage, n, g)


def _owed(load: StageLoad, piece: int, i: int) -> int:
    """Returns the bytes by which the backward of segment ``i`` changes the gradients for earlier pieces.

    The last piece of a micro batch runs its backward first and creates gradients for everything that it read
    from earlier pieces. The backward of each other piece consumes its own.
    """
    if piece == len(load.passes) - 1:
        return sum(p.segments[i].left for p in load.passes[:piece])
    return -load.passes[piece].segments[i].left
