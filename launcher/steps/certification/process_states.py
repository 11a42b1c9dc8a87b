"""Separates the process states of several trainings that run in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from launcher.parallel.model_state.module_globals import AroundSnapshot


class ProcessStates:
    """A separate process state for each data-parallel rank of the reference.

    A model may keep numbers in variables of its file, in attributes of a library's module, or in the
    environment. In a run each rank has its own process, but rank 0 runs the reference of all ranks in one
    process. ``names``: the Python modules that define the model.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = [*names]
        self._start = self._now()
        self._of: dict[int, AroundSnapshot] = {}

    def _now(self) -> AroundSnapshot:
        return AroundSnapshot(self._names)

    @contextmanager
    def process(self, rank: int, keep: bool) -> Iterator[None]:
        """Runs the block as in the process of ``rank``; ``keep``: the rank's next block continues from it."""
        outside = self._now()
        self._of.get(rank, self._start).restore()
        try:
            yield
            if keep:
                self._of[rank] = self._now()
        finally:
            outside.restore()

    def restart(self) -> None:
        """Resets all states, also that of this process: a resumed run starts new processes."""
        self._of.clear()
        self._start.restore()
