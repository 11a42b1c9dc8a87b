"""A model as tracing recorded it: the second input of a plan, besides the job."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.cut.sequence_chunks import SequencePieces
from launcher.plan.tensor_parallel.sharded_operators import UNCUT, TensorParallelPlan
from launcher.plan.values.model_graph import Graph, ModelStructure
from launcher.plan.values.note import Note
from launcher.plan.values.recomputed_module import Recomputed


@dataclass(frozen=True)
class TracedModel:
    """A model's parameters and modules (``skeleton``), and the calls of one forward (``graph``).

    ``leaves`` are the modules that the glue is traced between; ``None`` if one stage runs the model as it
    is. ``built_unsharded`` says why its parameters cannot be created shard by shard, if they cannot.
    ``operators`` says how modules are sharded over ``tp``, ``recomputed`` which of them run again in the
    backward, ``pieces`` how sequences are cut, if they are. ``keeps_messages``: the installed torch keeps the
    tensors that ranks send each other, for all micro batches, until the end of a step; otherwise only until
    the backward of their micro batch.
    """

    skeleton: ModelStructure
    graph: Graph
    leaves: tuple[str, ...] | None
    built_unsharded: Note | None = None
    operators: TensorParallelPlan = UNCUT
    recomputed: tuple[Recomputed, ...] = ()
    pieces: SequencePieces | None = None
    keeps_messages: bool = True

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The calls of one forward, or of one for each piece if sequences are cut."""
        return self.pieces.graphs if self.pieces else (self.graph,)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The positions in each piece of a sequence; empty if sequences are not cut."""
        return self.pieces.lengths if self.pieces else ()
