"""Supplies the cells of a sweep: all at once from a grid, or one after another from optuna."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from launcher.sweep.cell_process import CellResult
from launcher.sweep.requests import Checked

Reports = Sequence[tuple[int, float]]
"""The metric after some steps, as (step, value) in order."""


class Sampler(Protocol):
    """Call ``ask`` until the sampler is ``finished``, and ``tell`` it the result of each cell."""

    @property
    def finished(self) -> bool:
        """Whether there are no more cells."""

    @property
    def size(self) -> int | None:
        """The total number of cells, if it is known."""

    def ask(self) -> Checked | None:
        """The next cell; ``None`` while it waits for results of others."""

    def tell(self, result: CellResult, reports: Reports) -> None:
        """Takes the result of a cell, once; it is not called for interrupted cells."""

    def hopeless(self, name: str, reports: Reports) -> str:
        """Why the cell ``name`` should be pruned; "" if it should not."""


class GridSampler:
    """The cells of a grid, in order."""

    def __init__(self, cells: Sequence[Checked]) -> None:
        self._left = deque(cells)
        self.size = len(cells)

    @property
    def finished(self) -> bool:
        return not self._left

    def ask(self) -> Checked | None:
        return self._left.popleft()

    def tell(self, result: CellResult, reports: Reports) -> None:
        """Ignores the result: a grid does not depend on it."""

    def hopeless(self, name: str, reports: Reports) -> str:
        return ""
