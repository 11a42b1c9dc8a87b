"""What a rank holds at the fullest moment of a step over device matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.plan.cost.memory import Memory, local_bytes
from launcher.plan.cost.peak import Moment
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Sizes
from launcher.plan.schedule.actions import Row, Schedule


@dataclass(frozen=True)
class StageBytes:
    """One virtual stage on a rank, as it was seen to run; bytes.

    ``gathered``: weights that are whole for all of a step. ``kept``: of a micro batch from its forward to
    its backward; ``forward``: at the fullest moment of a forward; ``first`` and ``later``: of the first
    backward, which makes gradients, and of others, both with what was kept and without gradients that were
    there before. ``grads``: of shards and whole parameters, ``whole``: of gathered weights, until the step is
    over; ``reduced``: at the fullest moment of what is done then, with neither; ``left``: gradients after it.
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


def fullest(row: Row, stages: Mapping[int, StageBytes]) -> Moment:
    """Of all moments of a step of one pipeline rank, which runs ``row``."""
    return max(_moments(row, stages), key=lambda m: m.total)


def _moments(row: Row, stages: Mapping[int, StageBytes]) -> Iterator[Moment]:
    gathered = sum(s.gathered for s in stages.values())
    grads = kept = 0
    begun: set[int] = set()
    yield Moment(grads, gathered, kept)
    for action in row:
        here = stages[action.stage]
        if action.kind == "F":
            yield Moment(grads, gathered, kept + here.forward)
            kept += here.kept
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
    stages: Sequence[StageBytes], schedule: Schedule, sizes: Sizes, params: Iterable[Placed], copies: int
) -> tuple[Memory, ...]:
    """One row a rank: those of a stage are alike, for no cut is ragged. ``copies``: as for ``cost.memory``."""
    placed = tuple(params)
    out = []
    for pp, row in enumerate(schedule):
        here = sizes.held(pp)
        at = fullest(row, {s: stages[s] for s in here})
        ranks = sizes.grid.ranks(pp=pp)
        held = [
            (p.trainable, len(p.copies(here)) * local_bytes(p.layout, p.spec.dtype, ranks[0])) for p in placed
        ]
        one = Memory(
            rank=ranks[0],
            params=sum(n for _, n in held),
            grads=at.grads,
            optimizer=copies * sum(n for trainable, n in held if trainable),
            gathered=at.gathered,
            activations=at.activations,
        )
        out += [replace(one, rank=rank) for rank in ranks]
    return tuple(sorted(out, key=lambda m: m.rank))
