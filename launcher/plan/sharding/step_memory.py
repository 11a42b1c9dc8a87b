"""What a rank holds at the fullest moment of a step over device matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from launcher.plan.cost.memory import Memory, StateSize
from launcher.plan.cost.peak import Moment
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Sizes
from launcher.plan.partition.stages import Crossing
from launcher.plan.schedule.actions import Row, Schedule
from launcher.plan.values.facts import ITEMSIZE, TensorSpec


@dataclass(frozen=True)
class StageBytes:
    """One virtual stage on a rank, as it was seen to run; bytes.

    ``gathered``: weights that are whole for all of a step. ``kept``: of a micro batch from its forward to
    its backward; ``forward``: at the fullest moment of a forward; ``first`` and ``later``: of the first
    backward, which makes gradients, and of others, both with what was kept and without gradients that were
    there before. ``grads``: of shards and whole parameters, ``whole``: of gathered weights, until the step is
    over; ``reduced``: at the fullest moment of what is done then, with neither; ``left``: gradients after it.
    ``regathered``: how often the backward of a micro batch gathers each parameter of the stage again.
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
    """Bytes of a micro batch that a stage ``takes`` from another rank and ``gives`` to one, and of gradients.

    Torch receives into buffers for all micro batches, and keeps what it has sent until the step is over.
    """

    takes: int = 0
    returned: int = 0
    gives: int = 0
    answer: int = 0

    def beside(self, held: StageBytes) -> StageBytes:
        """What a stage holds besides."""
        return replace(
            held,
            kept=held.kept - self.takes - self.gives,
            forward=held.forward - self.takes,
            first=held.first - self.takes - self.gives - self.answer,
            later=held.later - self.takes - self.gives - self.answer,
        )


def fullest(row: Row, stages: Mapping[int, StageBytes], sent: Mapping[int, Messages]) -> Moment:
    """Of all moments of a step of one pipeline rank, which runs ``row``."""
    alone = {s: sent[s].beside(held) for s, held in stages.items()}
    return max(_moments(row, alone, sent), key=lambda m: m.total)


def _moments(row: Row, stages: Mapping[int, StageBytes], sent: Mapping[int, Messages]) -> Iterator[Moment]:
    gathered = sum(s.gathered for s in stages.values())
    grads = 0
    kept = sum(sent[a.stage].takes if a.kind == "F" else sent[a.stage].answer for a in row)  # buffers
    begun: set[int] = set()
    yield Moment(grads, gathered, kept)
    for action in row:
        here = stages[action.stage]
        if action.kind == "F":
            yield Moment(grads, gathered, kept + here.forward)
            kept += here.kept + sent[action.stage].gives
            continue
        kept -= here.kept
        yield Moment(grads, gathered, kept + (here.later if action.stage in begun else here.first))
        if action.stage not in begun:
            begun.add(action.stage)
            grads, gathered = grads + here.grads, gathered + here.whole

    # one stage after the other brings its gradients back
    for here in stages.values():
        yield Moment(grads, gathered, kept + here.reduced)
        grads, gathered = grads + here.left - here.grads, gathered - here.whole - here.gathered
        yield Moment(grads, gathered, kept)


def sharded_memory(
    stages: Sequence[StageBytes],
    boundaries: Sequence[tuple[Crossing, ...]],
    schedule: Schedule,
    sizes: Sizes,
    *,
    params: Iterable[Placed],
    state: StateSize,
) -> tuple[Memory, ...]:
    """One row a rank: those of a stage are alike. ``state``: as for ``cost.memory``."""
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


def _messages(boundaries: Sequence[tuple[Crossing, ...]], places: Sequence[int], s: int) -> Messages:
    out = Messages()
    if s and places[s - 1] != places[s]:
        specs = [t for c in boundaries[s - 1] for t in c.specs]
        out = replace(out, takes=sum(t.nbytes for t in specs), returned=_floats(specs))
    if s < len(places) - 1 and places[s + 1] != places[s]:
        specs = [t for c in boundaries[s] for t in c.specs]
        out = replace(out, gives=sum(t.nbytes for t in specs), answer=_floats(specs))
    return out


def _floats(specs: Iterable[TensorSpec]) -> int:
    """Bytes of their gradients."""
    return sum(t.nbytes for t in specs if "float" in t.dtype)
