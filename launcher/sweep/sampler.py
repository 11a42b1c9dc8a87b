"""Where the cells of a sweep come from: all at once from a grid, or one after another from optuna."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from launcher.sweep.cell_process import CellResult
from launcher.sweep.requests import Checked

Reports = Sequence[tuple[int, float]]
"""The metric after steps, in their order."""


class Sampler(Protocol):
    """``ask`` until it is ``finished``, and ``tell`` what came of each."""

    @property
    def finished(self) -> bool:
        """Whether no cell is to come."""

    @property
    def size(self) -> int | None:
        """How many cells there will be, if that is known."""

    def ask(self) -> Checked | None:
        """The next cell; ``None`` while it waits for what others come to."""

    def tell(self, result: CellResult, reports: Reports) -> None:
        """What came of a cell, once; not of one that was interrupted."""

    def hopeless(self, name: str, reports: Reports) -> str:
        """Why the cell of this ``name`` is not worth going on with, "" if it is."""


class GridSampler:
    """Those that there are, in order."""

    def __init__(self, cells: Sequence[Checked]) -> None:
        self._left = deque(cells)
        self.size = len(cells)

    @property
    def finished(self) -> bool:
        return not self._left

    def ask(self) -> Checked | None:
        return self._left.popleft()

    def tell(self, result: CellResult, reports: Reports) -> None:
        """Nothing hangs on it."""

    def hopeless(self, name: str, reports: Reports) -> str:
        return ""
