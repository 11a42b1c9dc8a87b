"""The bytes that a rank needs for some parts of a model: an estimate before the model is cut into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.schedule.schedules import Row, Schedule
from launcher.plan.values.dtypes import ITEMSIZE, WIDTH
from launcher.plan.values.model_graph import Graph, Node

Run = tuple[int, int, int]
"""A stage, its first part, and the part after its last."""


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer.

    ``parts`` use it. ``nbytes``: the bytes of everything that a rank keeps for it. ``apart``: each stage of a
    rank has its own copy. ``weights`` and ``grads`` are the bytes of the full tensors that exist for a moment
    when it is gathered.
    """

    parts: frozenset[int]
    nbytes: int
    apart: bool
    weights: int = 0
    grads: int = 0


@dataclass(frozen=True)
class KeptBytes:
    """The bytes of one micro batch, or a piece of one, in a part.

    ``saved`` is kept for the backward, and ``waits`` of it for the second half of a split backward. ``work``
    is what the fullest moment of its backward needs in addition.
    """

    saved: int
    waits: int
    work: int


@dataclass(frozen=True)
class BoundaryBytes:
    """The bytes of one piece that leave a part for later ones; ``grads``: those that come back."""

    nbytes: int
    grads: int


@dataclass(frozen=True)
class InFlight:
    """The progress of one stage and piece at one moment.

    ``in_flight`` counts forwards whose backward has not run, ``waiting`` second halves of backwards that have
    not run, ``forwards`` and ``backwards`` those that are done.
    """

    in_flight: int = 0
    waiting: int = 0
    forwards: int = 0
    backwards: int = 0


@dataclass(frozen=True)
class PartMemory:
    """Everything from which ``peak_bytes`` computes the memory of a rank.

    ``kept`` and ``crossings`` are indexed by piece, then by part. ``logits``: bytes of the output, and of the
    copy that the loss keeps. ``moments``: for each rank, the moments at which its memory may be fullest, by
    stage and piece. ``keeps_messages`` is that of ``TracedModel``.
    """

    tensors: tuple[Tensor, ...]
    kept: tuple[tuple[KeptBytes, ...], ...]
    crossings: tuple[tuple[BoundaryBytes, ...], ...]
    logits: tuple[int, int]
    places: tuple[int, ...]
    moments: tuple[tuple[Mapping[tuple[int, int], InFlight], ...], ...]
    micros: int
    keeps_messages: bool

    @property
    def parts(self) -> int:
        return len(self.kept[0])

    @cached_property
    def _alone(self) -> tuple[int, ...]:
        """For each part, the bytes of all parts before it in tensors that only one part uses."""
        of = Counter[int]()
        for t in self.tensors:
            if len(t.parts) == 1:
                of[next(iter(t.parts))] += t.nbytes
        return tuple(accumulate((of[part] for part in range(self.parts)), initial=0))

    @property
    def state(self) -> tuple[int, ...]:
        """The bytes that each part keeps during the entire step, without tensors of several parts."""
        return tuple(j - i for i, j in pairwise(self._alone))

    @property
    def saved(self) -> tuple[int, ...]:
        """The bytes that each part keeps of a micro batch, or of its largest piece."""
        return tuple(max(k.saved for k in part) for part in zip(*self.kept, strict=True))

    @property
    def flying(self) -> tuple[int, ...]:
        """The micro batches, or pieces, that each stage has in flight when its rank has most."""
        out = []
        for stage, rank in enumerate(self.places):
            fullest = max(self.moments[rank], key=lambda m: sum(n.in_flight + n.waiting for n in m.values()))
            out.append(sum(n.in_flight + n.waiting for (s, _), n in fullest.items() if s == stage))
        return tuple(out)

    @cached_property
    def _shared(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if len(t.parts) > 1)

    @cached_property
    def _full_bytes(self) -> tuple[tuple[int, int], ...]:
        """The bytes of the full weights and full gradients of each part that exist for a moment."""
        weights, grads = Counter[int](), Counter[int]()
        for t in self.tensors:
            weights[min(t.parts)] += t.weights
            grads[min(t.parts)] += t.grads
        return tuple((weights[part], grads[part]) for part in range(self.parts))

    @cached_property
    def _sums(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each piece and part, the ``saved`` and ``waits`` bytes of all parts before it."""
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

    def peak_bytes(self, rank: int, runs: tuple[Run, ...]) -> int:
        """Returns the bytes that a pipeline rank with these runs of parts uses at its fullest moment."""
        state = sum(self._alone[j] - self._alone[i] for _, i, j in runs)
        for t in self._shared:
            copies = sum(any(i <= part < j for part in t.parts) for _, i, j in runs)
            state += t.nbytes * (copies if t.apart else min(copies, 1))

        # what micro batches in flight keep, and what one backward needs in addition
        sizes = {(run[0], piece): self._sizes(run, piece) for run in runs for piece in range(len(self.kept))}
        flying = max(
            sum(_bytes(sizes[key], moment) for key, moment in moments.items() if key in sizes)
            for moments in self.moments[rank]
        )
        return state + flying + max(map(self._for_a_moment, runs)) + sum(map(self._buffers, runs))

    def _for_a_moment(self, run: Run) -> int:
        """Returns the most bytes that a backward of ``run`` adds; a backward begins with the last part."""
        _, start, end = run
        most = 2 * self.logits[1] if end == self.parts else 0
        for row in self.kept:
            gone = 0
            for part in range(end - 1, start - 1, -1):
                weights, grads = self._full_bytes[part]
                ahead = self._full_bytes[part - 1][0] if part > start else 0
                most = max(most, max(row[part].work, grads) + grads + weights + ahead - gone)
                gone += row[part].saved
        return most

    def _sizes(self, run: Run, piece: int) -> InFlight:
        """Returns the bytes of one item of each kind that an ``InFlight`` counts."""
        stage, start, end = run
        (saved, waits), (saved_end, waits_end) = self._sums[piece][start], self._sums[piece][end]
        last = end == self.parts
        crossing = self.crossings[piece]
        made = crossing[end - 1] if not last else BoundaryBytes(self.logits[0], 0)
        away = not last and self.places[stage + 1] != self.places[stage]
        far = stage > 0 and self.places[stage - 1] != self.places[stage]
        took = crossing[start - 1] if far else BoundaryBytes(0, 0)

        activations = saved_end - saved + (self.logits[1] if last else 0)
        sent = made.nbytes if away and self.keeps_messages else 0
        if not sent:
            activations += made.nbytes
        if not self.keeps_messages:
            activations += took.nbytes
        return InFlight(activations, waits_end - waits, sent, took.grads)

    def _buffers(self, run: Run) -> int:
        """Returns the bytes of torch's receive buffers for all micro batches."""
        stage, start, end = run
        out = 0
        if self.keeps_messages and stage and self.places[stage - 1] != self.places[stage]:
            out += sum(row[start - 1].nbytes for row in self.crossings)
        if self.keeps_messages and end < self.parts and self.places[stage + 1] != self.places[stage]:
            out += sum(row[end - 1].grads for row in self.crossings)
        return self.micros * out


def _bytes(size: InFlight, n: InFlight) -> int:
    return (
        size.in_flight * n.in_flight
        + size.waiting * n.waiting
        + size.forwards * n.forwards
        + size.backwards * n.backwards
    )


def tensor(p: Placed, shape: tuple[int, ...], parts: frozenset[int], state: int, level: str | None) -> Tensor:
    """Returns the tensor of ``p`` with everything that a rank keeps for it.

    Besides the weight this is its gradient, the optimizer's state, and what ``level`` keeps gathered.

    Args:
        p: the parameter or buffer.
        shape: of the part of ``p`` that a rank has.
        parts: the parts of the model that use it.
        state: bytes of optimizer state for that shape.
        level: the ``optimizer_level`` of HSDP, if there is one.
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


def kept(nodes: Sequence[Node]) -> KeptBytes:
    """Returns what the nodes of a part keep."""
    return KeptBytes(
        saved=sum(n.saved for n in nodes),
        waits=sum(n.backward.kept for n in nodes),
        work=max((max(n.backward.work, n.backward.summed) for n in nodes), default=0),
    )


def crossings(graph: Graph, at: Mapping[str, int], parts: int) -> tuple[BoundaryBytes, ...]:
    """Returns what leaves each part; ``at``: the part of each node."""
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
    return tuple(map(BoundaryBytes, nbytes, grads))


def logits_nbytes(graph: Graph) -> tuple[int, int]:
    """Returns the bytes of the output, and of the copy that the loss keeps, in float32 at least."""
    specs = graph.nodes[-1].out or ()
    return sum(t.nbytes for t in specs), sum(prod(t.shape) * max(4, WIDTH[t.dtype]) for t in specs[:1])


def moments(schedule: Schedule, pieces: int) -> tuple[tuple[Mapping[tuple[int, int], InFlight], ...], ...]:
    """Returns for each rank the moments with most in flight: in all its stages together, and in each one.

    Of equal moments the last one counts.
    """
    return tuple(tuple(_fullest(row, pieces)) for row in schedule)


def _fullest(row: Row, pieces: int) -> Iterator[Mapping[tuple[int, int], InFlight]]:
    """Yields the fullest moments of a rank.

    After a forward a rank keeps other tensors than after the first half of a backward, so the fullest moments
    of both kinds are returned.
    """
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

    # the progress of each stage at these moments
    chosen = {i for _, i in most.values()}
    counts = {(stage, piece): [0, 0, 0, 0] for stage in flying for piece in range(pieces)}
    for i, a in enumerate(row):
        _count(counts[a.stage, a.micro % pieces], a.kind)
        if i in chosen:
            yield {key: InFlight(*n) for key, n in counts.items()}


def _count(n: list[int], kind: str) -> None:
    """Adds one action of a stage to ``n``, the fields of its ``InFlight`` so far."""
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
