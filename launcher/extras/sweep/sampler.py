"""Samplers, which choose the next cell of a sweep; here the one for grids."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.metrics_rows import Reports
from launcher.extras.sweep.requests import CheckedCell


class Sampler(Protocol):
    """Call ``ask`` until the sampler is ``finished``, and ``tell`` it the result of each cell."""

    @property
    def finished(self) -> bool:
        """True if there are no more cells."""

    @property
    def size(self) -> int | None:
        """The total number of cells, if it is known."""

    def ask(self) -> CheckedCell | None:
        """Returns the next cell; ``None`` while the sampler waits for results."""

    def tell(self, result: CellResult, reports: Reports) -> None:
        """Called once with the result of each cell that was not interrupted."""

    def prune_reason(self, name: str, reports: Reports) -> str:
        """Returns why the cell ``name`` should be pruned; "" if it should not."""


class GridSampler:
    """The cells of a grid, in order."""

    def __init__(self, cells: Sequence[CheckedCell]) -> None:
        self._remaining = deque(cells)
        self.size = len(cells)

    @property
    def finished(self) -> bool:
        return not self._remaining

    def ask(self) -> CheckedCell | None:
        return self._remaining.popleft()

    def tell(self, result: CellResult, reports: Reports) -> None:
        """Ignores the result: a grid does not depend on it."""

    def prune_reason(self, name: str, reports: Reports) -> str:
        return ""
