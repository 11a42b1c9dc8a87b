"""Ends a run if a callback or a schedule sets a value that not all computations of this layout would see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from launcher.errors import RunError
from launcher.parallel.model_state.variables_read import OutsideChanges
from launcher.plan.values.module_names import listed
from launcher.plan.values.text import many

EVERY_RANK = "every_rank"
"""The attribute that a class sets to True to be called on every rank, not only on the first."""


class NotSeenByAll(RunError):
    """A value was set that not all computations of this layout would see."""


@dataclass
class ChangesBetweenSteps:
    """Compares what forwards and the loss read before and after a call of the user's code between steps.

    In one process such a call sets a value for all of the training: the weight of a term of the loss, a
    temperature, ``requires_grad`` of a part of the model.
    """

    changes: OutsideChanges
    ranks: int
    stages: int

    @contextmanager
    def compared(self, name: str, everywhere: bool) -> Iterator[None]:
        """Raises ``NotSeenByAll`` if the block changes a value for some computations only.

        ``name``: the user's code, for the message. ``everywhere``: all ranks run it.
        """
        before = self.changes.now()
        yield
        places, recorded = self.changes.since(before)
        if places and not everywhere and self.ranks > 1:
            text = f"{name} has set {listed(places)}, which a forward or the loss uses, on rank 0 only"
            cure = f"set {EVERY_RANK} = True in the class: then each rank creates it and calls its hooks"
            raise NotSeenByAll(f"{text}: the other ranks would train with the old value; {cure}")
        if recorded:
            text = f"{name} has set {listed(recorded)}, which the code between the model's modules uses"
            why = f"with {many(self.stages, 'stage')} this code was recorded with the old value"
            cure = "use the value in the forward of a module that is on one stage, or train with one stage"
            raise NotSeenByAll(f"{text}; {why}; {cure}")
