"""The results of a search."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from launcher.planner.search.evaluate import Predicted, Question, best
from launcher.planner.search.layout import Layout


@dataclass
class Ranking:
    """The predictions ``found``, out of so many ``layouts``.

    ``refused``: the number of impossible layouts by reason. ``beyond``: layouts that cannot be faster than
    the best. ``too_large``: layouts whose bound exceeds the memory. ``left``: layouts that were not examined.
    """

    question: Question
    layouts: int
    found: list[Predicted] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    too_large: list[tuple[float, Layout]] = field(default_factory=list)
    beyond: int = 0
    left: int = 0

    @property
    def best(self) -> list[Predicted]:
        return best(self.found, self.question.room)

    @property
    def front(self) -> list[Predicted]:
        """Predictions that no other beats in both seconds and bytes, fastest first."""
        out: list[Predicted] = []
        for one in self.best:
            if not out or one.nbytes < out[-1].nbytes:
                out.append(one)
        return out
