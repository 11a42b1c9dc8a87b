"""Keeps apart what each of several trainings in one process leaves behind in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from launcher.parallel.model_state.module_globals import AroundSnapshot


class ProcessStates:
    """The state of a process of its own for each data-parallel rank of the reference.

    A model may keep numbers in variables of its file, on a library's module, or in the environment. Each rank
    has a process, but certifying runs the reference of all of them in that of rank 0. ``names``: the Python
    modules that define the model.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = [*names]
        self._start = self._now()
        self._of: dict[int, AroundSnapshot] = {}

    def _now(self) -> AroundSnapshot:
        return AroundSnapshot(self._names)

    @contextmanager
    def process(self, rank: int, keep: bool) -> Iterator[None]:
        """Run the block as in the process of ``rank``; ``keep``: its next block goes on from there."""
        outside = self._now()
        self._of.get(rank, self._start).restore()
        try:
            yield
            if keep:
                self._of[rank] = self._now()
        finally:
            outside.restore()

    def restart(self) -> None:
        """Begin anew, this process too, as a run does that goes on from a checkpoint."""
        self._of.clear()
        self._start.restore()
