"""What a search has looked at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from launcher.planner.search.evaluate import Predicted, Question, best
from launcher.planner.search.layout import Layout


@dataclass
class Ranking:
    """``found``: all that were planned of so many ``layouts``.

    ``refused``: by reason; ``beyond``: those that take longer at least than the best; ``too_large``: those
    that need more memory at least than there is; ``left``: not looked at.
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
        """Those that nothing is both faster and leaner than, the fastest first."""
        out: list[Predicted] = []
        for one in self.best:
            if not out or one.nbytes < out[-1].nbytes:
                out.append(one)
        return out
