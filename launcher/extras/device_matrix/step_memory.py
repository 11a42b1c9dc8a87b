"""The peak memory of a rank in a step over device matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from launcher.plan.cut.params import Placed
from launcher.plan.cut.stages import BoundaryTensor
from launcher.plan.memory.memory import Memory, StateSize
from launcher.plan.memory.walk import MemoryInUse
from launcher.plan.schedule.schedules import Row, Schedule
from launcher.plan.sizes import Sizes
from launcher.plan.values.facts import ITEMSIZE, TensorSpec


@dataclass(frozen=True)
class StageBytes:
    """The bytes of one virtual stage on a rank, measured in a run.

    ``gathered``: weights that stay gathered for the entire step. ``kept``: bytes of a micro batch from its
    forward to its backward. ``forward``: the peak of a forward. ``first`` and ``later``: the peaks of the
    first backward, which allocates gradients, and of later ones; both include ``kept``, but not gradients
    that existed before. ``grads``: gradients of shards and unsharded parameters, ``whole``: those of gathered
    weights, both until the end of the step. ``reduced``: the peak of the reduction at the end, without
    either. ``left``: gradients after it. ``regathered``: how often the backward of a micro batch gathers each
    parameter of the stage again.
    """

    gathered: int
    kept: int
    forward: int
    first: int
    later: int
    grads: int
    whole: int
    reduced: int
    left: int
    regathered: tuple[int, ...]


@dataclass(frozen=True)
class Messages:
    """The bytes of a micro batch that a stage exchanges with other ranks.

    A stage ``takes`` inputs and ``gives`` outputs; ``returned`` are the gradients of its inputs, and
    ``answer`` those of its outputs. Torch receives into buffers for all micro batches, and keeps sent tensors
    until the end of the step.
    """

    takes: int = 0
    returned: int = 0
    gives: int = 0
    answer: int = 0

    def beside(self, held: StageBytes) -> StageBytes:
        """Returns ``held`` without the bytes of these messages."""
        return replace(
            held,
            kept=held.kept - self.takes - self.gives,
            forward=held.forward - self.takes,
            first=held.first - self.takes - self.gives - self.answer,
            later=held.later - self.takes - self.gives - self.answer,
        )


def fullest(row: Row, stages: Mapping[int, StageBytes], sent: Mapping[int, Messages]) -> MemoryInUse:
    """Returns the moment with the most memory in a step of the pipeline rank that runs ``row``."""
    alone = {s: sent[s].beside(held) for s, held in stages.items()}
    return max(_moments(row, alone, sent), key=lambda m: m.total)


def _moments(
    row: Row, stages: Mapping[int, StageBytes], sent: Mapping[int, Messages]
) -> Iterator[MemoryInUse]:
    gathered = sum(s.gathered for s in stages.values())
    grads = 0
    kept = sum(sent[a.stage].takes if a.kind == "F" else sent[a.stage].answer for a in row)  # buffers
    begun: set[int] = set()
    yield MemoryInUse(grads, gathered, kept)
    for action in row:
        here = stages[action.stage]
        if action.kind == "F":
            yield MemoryInUse(grads, gathered, kept + here.forward)
            kept += here.kept + sent[action.stage].gives
            continue
        kept -= here.kept
        yield MemoryInUse(grads, gathered, kept + (here.later if action.stage in begun else here.first))
        if action.stage not in begun:
            begun.add(action.stage)
            grads, gathered = grads + here.grads, gathered + here.whole

    # the stages reduce their gradients one after the other
    for here in stages.values():
        yield MemoryInUse(grads, gathered, kept + here.reduced)
        grads, gathered = grads + here.left - here.grads, gathered - here.whole - here.gathered
        yield MemoryInUse(grads, gathered, kept)


def sharded_memory(
    stages: Sequence[StageBytes],
    boundaries: Sequence[tuple[BoundaryTensor, ...]],
    schedule: Schedule,
    sizes: Sizes,
    *,
    params: Iterable[Placed],
    state: StateSize,
) -> tuple[Memory, ...]:
    """Returns the peak memory of each rank; those of one pipeline rank are equal.

    ``state``: the size of optimizer state, as for ``cost.memory``.
    """
    sent = [_messages(boundaries, sizes.places, s) for s in range(len(stages))]
    placed = tuple(params)
    out = []
    for pp, row in enumerate(schedule):
        here = sizes.held(pp)
        at = fullest(row, {s: stages[s] for s in here}, {s: sent[s] for s in here})
        ranks = sizes.grid.ranks(pp=pp)
        held = [(p, len(p.copies(here)), box) for p in placed if (box := p.layout.box(ranks[0])) is not None]
        one = Memory(
            rank=ranks[0],
            params=sum(n * prod(box.shape) * ITEMSIZE[p.spec.dtype] for p, n, box in held),
            grads=at.grads,
            optimizer=sum(n * state.nbytes(p, box.shape) for p, n, box in held),
            gathered=at.gathered,
            activations=at.activations,
        )
        out += [replace(one, rank=rank) for rank in ranks]
    return tuple(sorted(out, key=lambda m: m.rank))


def _messages(boundaries: Sequence[tuple[BoundaryTensor, ...]], places: Sequence[int], s: int) -> Messages:
    out = Messages()
    if s and places[s - 1] != places[s]:
        specs = [t for c in boundaries[s - 1] for t in c.specs]
        out = replace(out, takes=sum(t.nbytes for t in specs), returned=_floats(specs))
    if s < len(places) - 1 and places[s + 1] != places[s]:
        specs = [t for c in boundaries[s] for t in c.specs]
        out = replace(out, gives=sum(t.nbytes for t in specs), answer=_floats(specs))
    return out


def _floats(specs: Iterable[TensorSpec]) -> int:
    """The bytes of the gradients of these tensors."""
    return sum(t.nbytes for t in specs if "float" in t.dtype)
