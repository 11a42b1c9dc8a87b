"""What a plan is made for besides the job: a model as tracing found it."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.operators.resolve import WHOLE, Flow
from launcher.plan.partition.sequence_chunks import Pieces
from launcher.plan.partition.sizes import Note
from launcher.plan.values.facts import Graph, Skeleton
from launcher.plan.values.recomputed import Recomputed


@dataclass(frozen=True)
class TracedModel:
    """A model's parameters and modules (``skeleton``), and the calls of one forward (``graph``).

    ``leaves`` are the modules that the glue is traced between; ``None`` when one stage runs the model as it
    is. ``built_whole`` says why its parameters cannot be made shard by shard, if they cannot. ``operators``:
    how modules are spread over ``tp``; ``recomputed``: which of them run again in the backward; ``pieces``:
    how its sequences are cut, if they are. ``keeps_messages``: the torch that runs it keeps what ranks send
    each other, of all micro batches, until a step is over; else only until the backward of each.
    """

    skeleton: Skeleton
    graph: Graph
    leaves: tuple[str, ...] | None
    built_whole: Note | None = None
    operators: Flow = WHOLE
    recomputed: tuple[Recomputed, ...] = ()
    pieces: Pieces | None = None
    keeps_messages: bool = True

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The calls of one forward, of each piece of a sequence where they are cut."""
        return self.pieces.graphs if self.pieces else (self.graph,)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions in each piece of a sequence; none where they pass whole."""
        return self.pieces.lengths if self.pieces else ()
