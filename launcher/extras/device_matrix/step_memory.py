"""The peak memory of a rank in a step over device matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.plan.cut.stages import BoundaryTensor
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.memory.optimizer_state import StateSize
from launcher.plan.memory.rank_loads import StageMessages, stage_messages
from launcher.plan.memory.rank_memory import Memory, memory
from launcher.plan.memory.walk import MemoryInUse
from launcher.plan.schedule.schedules import Row, Schedule
from launcher.plan.sizes import Sizes


@dataclass(frozen=True)
class StageBytes:
    """The bytes of one virtual stage on a rank, measured in a run.

    ``gathered``: weights that stay gathered for the entire step. ``kept``: bytes of a micro batch from its
    forward to its backward. ``forward``: the peak of a forward. ``first`` and ``later``: the peaks of the
    first backward, which allocates gradients, and of later ones; both include ``kept``, but not gradients
    that existed before. ``grads``: gradients of shards and unsharded parameters, ``gathered_grads``: those of
    gathered weights, both until the end of the step. ``reduced``: the peak of the reduction at the end,
    without these gradients. ``reduced_grads``: gradients after it. ``regathered``: how often the backward of
    a micro batch gathers each parameter of the stage again.
    """

    gathered: int
    kept: int
    forward: int
    first: int
    later: int
    grads: int
    gathered_grads: int
    reduced: int
    reduced_grads: int
    regathered: tuple[int, ...]

    def beside(self, sent: StageMessages) -> StageBytes:
        """Returns the bytes of the stage without those of its messages."""
        return replace(
            self,
            kept=self.kept - sent.takes - sent.gives,
            forward=self.forward - sent.takes,
            first=self.first - sent.takes - sent.gives - sent.answer,
            later=self.later - sent.takes - sent.gives - sent.answer,
        )


def fullest(row: Row, stages: Mapping[int, StageBytes], sent: Mapping[int, StageMessages]) -> MemoryInUse:
    """Returns the moment with the most memory in a step of the pipeline rank that runs ``row``."""
    alone = {s: stage_bytes.beside(sent[s]) for s, stage_bytes in stages.items()}
    return max(_moments(row, alone, sent), key=lambda m: m.total)


def _moments(
    row: Row, stages: Mapping[int, StageBytes], sent: Mapping[int, StageMessages]
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
            grads, gathered = grads + here.grads, gathered + here.gathered_grads

    # the stages reduce their gradients one after the other
    for here in stages.values():
        yield MemoryInUse(grads, gathered, kept + here.reduced)
        grads, gathered = (
            grads + here.reduced_grads - here.grads,
            gathered - here.gathered_grads - here.gathered,
        )
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

    ``state``: what the optimizer keeps of each parameter.
    """
    sent = [stage_messages(boundaries, sizes.places, s) for s in range(len(stages))]
    moments = []
    for pp, row in enumerate(schedule):
        here = sizes.stages_of(pp)
        moments.append(fullest(row, {s: stages[s] for s in here}, {s: sent[s] for s in here}))
    return memory(tuple(params), sizes, state, tuple(moments))
