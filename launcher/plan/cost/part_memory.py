"""Bytes that a rank needs for the parts of a model that it gets: an estimate, before the model is cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

from launcher.plan.partition.params import Placed
from launcher.plan.schedule.actions import Row, Schedule
from launcher.plan.values.facts import ITEMSIZE, WIDTH, Graph, Node

Run = tuple[int, int, int]
"""A stage, its first part, and the one after its last."""


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer: the ``parts`` that use it; ``nbytes`` on a rank, of all that is kept for it.

    ``apart``: stages of one rank have copies of their own. For a moment there are its ``weights`` and its
    ``grads`` as a whole, where it is gathered for that.
    """

    parts: frozenset[int]
    nbytes: int
    apart: bool
    weights: int = 0
    grads: int = 0


@dataclass(frozen=True)
class Kept:
    """Bytes of one micro batch, or a piece of one, in a part.

    ``saved`` for the backward, and ``waits`` of it for the second half; ``work``: what the fullest moment of
    its backward needs.
    """

    saved: int
    waits: int
    work: int


@dataclass(frozen=True)
class Crossing:
    """Bytes that leave a part for later ones, of one piece; ``grads``: those that come back."""

    nbytes: int
    grads: int


@dataclass(frozen=True)
class Moment:
    """What of one stage and piece is there: ``held`` forwards whose backward has not come, ``waiting`` second
    halves; ``forwards`` and ``backwards`` that are done.
    """

    held: int = 0
    waiting: int = 0
    forwards: int = 0
    backwards: int = 0


@dataclass(frozen=True)
class PartMemory:
    """What ``held`` is worked out of.

    ``kept`` and ``crossings``: of each piece, its parts; ``logits``: bytes of the output, and of the loss's
    copy. ``moments``: of each rank, by stage and piece, those at which most may be there.
    ``keeps_messages``: as ``TracedModel`` has it.
    """

    tensors: tuple[Tensor, ...]
    kept: tuple[tuple[Kept, ...], ...]
    crossings: tuple[tuple[Crossing, ...], ...]
    logits: tuple[int, int]
    places: tuple[int, ...]
    moments: tuple[tuple[Mapping[tuple[int, int], Moment], ...], ...]
    micros: int
    keeps_messages: bool

    @property
    def parts(self) -> int:
        return len(self.kept[0])

    @cached_property
    def _alone(self) -> tuple[int, ...]:
        """Of tensors of one part, what all parts before each one have."""
        of = Counter[int]()
        for t in self.tensors:
            if len(t.parts) == 1:
                of[next(iter(t.parts))] += t.nbytes
        return tuple(accumulate((of[part] for part in range(self.parts)), initial=0))

    @property
    def state(self) -> tuple[int, ...]:
        """Bytes of each part by itself that are there all along."""
        return tuple(j - i for i, j in pairwise(self._alone))

    @property
    def saved(self) -> tuple[int, ...]:
        """Bytes that each part keeps of a micro batch, or of its largest piece."""
        return tuple(max(k.saved for k in part) for part in zip(*self.kept, strict=True))

    @property
    def flying(self) -> tuple[int, ...]:
        """Micro batches, or pieces of them, of each stage when its rank has most in flight."""
        out = []
        for stage, rank in enumerate(self.places):
            fullest = max(self.moments[rank], key=lambda m: sum(n.held + n.waiting for n in m.values()))
            out.append(sum(n.held + n.waiting for (s, _), n in fullest.items() if s == stage))
        return tuple(out)

    @cached_property
    def _shared(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if len(t.parts) > 1)

    @cached_property
    def _whole(self) -> tuple[tuple[int, int], ...]:
        """Weights and gradients of each part that are there as a whole for a moment."""
        weights, grads = Counter[int](), Counter[int]()
        for t in self.tensors:
            weights[min(t.parts)] += t.weights
            grads[min(t.parts)] += t.grads
        return tuple((weights[part], grads[part]) for part in range(self.parts))

    @cached_property
    def _sums(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each piece, ``saved`` and ``waits`` of all parts before each one."""
        return tuple(
            tuple(
                zip(
                    accumulate((k.saved for k in row), initial=0),
                    accumulate((k.waits for k in row), initial=0),
                    strict=True,
                )
            )
            for row in self.kept
        )

    def held(self, rank: int, runs: tuple[Run, ...]) -> int:
        """On a rank of the pipeline with these runs of parts, at the fullest moment of a step."""
        state = sum(self._alone[j] - self._alone[i] for _, i, j in runs)
        for t in self._shared:
            copies = sum(any(i <= part < j for part in t.parts) for _, i, j in runs)
            state += t.nbytes * (copies if t.apart else min(copies, 1))

        # what micro batches in flight keep, and what one backward needs besides
        sizes = {(run[0], piece): self._sizes(run, piece) for run in runs for piece in range(len(self.kept))}
        flying = max(
            sum(_bytes(sizes[key], moment) for key, moment in moments.items() if key in sizes)
            for moments in self.moments[rank]
        )
        return state + flying + max(map(self._for_a_moment, runs)) + sum(map(self._buffers, runs))

    def _for_a_moment(self, run: Run) -> int:
        """Most that a backward needs besides, or has not let go of: it goes through the last part first."""
        _, start, end = run
        most = 2 * self.logits[1] if end == self.parts else 0
        for row in self.kept:
            gone = 0
            for part in range(end - 1, start - 1, -1):
                weights, grads = self._whole[part]
                ahead = self._whole[part - 1][0] if part > start else 0
                most = max(most, max(row[part].work, grads) + grads + weights + ahead - gone)
                gone += row[part].saved
        return most

    def _sizes(self, run: Run, piece: int) -> Moment:
        """Bytes of one of each that a moment counts."""
        stage, start, end = run
        (saved, waits), (saved_end, waits_end) = self._sums[piece][start], self._sums[piece][end]
        last = end == self.parts
        crossing = self.crossings[piece]
        made = crossing[end - 1] if not last else Crossing(self.logits[0], 0)
        away = not last and self.places[stage + 1] != self.places[stage]
        far = stage > 0 and self.places[stage - 1] != self.places[stage]
        took = crossing[start - 1] if far else Crossing(0, 0)

        held = saved_end - saved + (self.logits[1] if last else 0)
        sent = made.nbytes if away and self.keeps_messages else 0
        if not sent:
            held += made.nbytes
        if not self.keeps_messages:
            held += took.nbytes
        return Moment(held, waits_end - waits, sent, took.grads)

    def _buffers(self, run: Run) -> int:
        """What torch receives into, for all micro batches."""
        stage, start, end = run
        out = 0
        if self.keeps_messages and stage and self.places[stage - 1] != self.places[stage]:
            out += sum(row[start - 1].nbytes for row in self.crossings)
        if self.keeps_messages and end < self.parts and self.places[stage + 1] != self.places[stage]:
            out += sum(row[end - 1].grads for row in self.crossings)
        return self.micros * out


def _bytes(size: Moment, n: Moment) -> int:
    return (
        size.held * n.held
        + size.waiting * n.waiting
        + size.forwards * n.forwards
        + size.backwards * n.backwards
    )


def tensor(p: Placed, shape: tuple[int, ...], parts: frozenset[int], state: int, level: str | None) -> Tensor:
    """With its gradient, ``state`` of the optimizer, and what is gathered of it all along at ``level``.

    ``shape``: of the part that a rank has; ``state``: bytes for that.
    """
    local = prod(shape) * ITEMSIZE[p.spec.dtype]
    nbytes = local + state
    if not p.sharded:
        half = p.gathered if p.compute != p.spec.dtype else 0
        return Tensor(parts, nbytes + (p.nbytes + half if p.trainable else 0), p.buffer)

    weights, grads = p.padded * ITEMSIZE[p.compute], p.gathered if p.trainable else 0
    if level == "level1":
        return Tensor(parts, nbytes + weights + grads, True)
    nbytes += local if p.trainable else 0
    if level == "level2":
        return Tensor(parts, nbytes + weights, True, grads=grads)
    return Tensor(parts, nbytes, True, weights, grads)


def kept(nodes: Sequence[Node]) -> Kept:
    """Of the nodes of a part."""
    return Kept(
        saved=sum(n.saved for n in nodes),
        waits=sum(n.backward.kept for n in nodes),
        work=max((max(n.backward.work, n.backward.summed) for n in nodes), default=0),
    )


def crossings(graph: Graph, at: Mapping[str, int], parts: int) -> tuple[Crossing, ...]:
    """What leaves each part; ``at``: the part of each node."""
    ends = {n.name: at[n.name] for n in graph.nodes}
    for n in graph.nodes:
        for m in n.inputs:
            ends[m] = max(ends[m], at[n.name])
    nbytes, grads = [0] * parts, [0] * parts
    for n in graph.nodes:
        specs = () if n.kind == "param" else n.out or ()
        for part in range(at[n.name], ends[n.name]):
            nbytes[part] += sum(t.nbytes for t in specs)
            grads[part] += sum(t.nbytes for t in specs if "float" in t.dtype)
    return tuple(map(Crossing, nbytes, grads))


def logits(graph: Graph) -> tuple[int, int]:
    """Bytes of the output, and of what the loss keeps of it, in float32 at least."""
    specs = graph.nodes[-1].out or ()
    return sum(t.nbytes for t in specs), sum(prod(t.shape) * max(4, WIDTH[t.dtype]) for t in specs[:1])


def moments(schedule: Schedule, pieces: int) -> tuple[tuple[Mapping[tuple[int, int], Moment], ...], ...]:
    """Of each rank those with most in flight: of all its stages together, and of each one; the last such."""
    return tuple(tuple(_fullest(row, pieces)) for row in schedule)


def _fullest(row: Row, pieces: int) -> Iterator[Mapping[tuple[int, int], Moment]]:
    """Apart from each other after forwards and after first halves of backwards, which are not alike."""
    flying = dict.fromkeys((a.stage for a in row), 0)
    most: dict[tuple[int, str], tuple[int, int]] = {}
    together = 0
    for i, a in enumerate(row):
        more = {"F": 1, "I": 0}.get(a.kind, -1)
        flying[a.stage] += more
        together += more
        if more >= 0:
            for key, now in (((a.stage, a.kind), flying[a.stage]), ((-1, a.kind), together)):
                most[key] = max(most.get(key, (0, 0)), (now, i))

    # what there is then of each stage
    wanted = {i for _, i in most.values()}
    counts = {(stage, piece): [0, 0, 0, 0] for stage in flying for piece in range(pieces)}
    for i, a in enumerate(row):
        _count(counts[a.stage, a.micro % pieces], a.kind)
        if i in wanted:
            yield {key: Moment(*n) for key, n in counts.items()}


def _count(n: list[int], kind: str) -> None:
    """One more action of a stage: its ``Moment`` so far."""
    if kind == "F":
        n[0] += 1
        n[2] += 1
    elif kind == "I":
        n[0] -= 1
        n[1] += 1
        n[3] += 1
    elif kind == "W":
        n[1] -= 1
    else:
        n[0] -= 1
        n[3] += 1
