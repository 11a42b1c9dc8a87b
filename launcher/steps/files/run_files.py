"""The run as a step on files sees it: its folder, its settings, and the figures so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.read import best_checkpoint
from launcher.checkpoint.store import latest
from launcher.errors import RunError, said
from launcher.job.schema.job import Job
from launcher.job.schema.run_paths import BEST
from launcher.job.schema.steps import Step
from launcher.plan.plan import Plan
from launcher.plan.values.trust import Trust, trust
from launcher.plan.verbs import VERBS


def best(checkpoints: Path, trust: Trust) -> Path:
    """Raises ``RunError`` where nobody has said which that is."""
    try:
        return best_checkpoint(checkpoints, trust)
    except (ValueError, OSError) as error:
        raise RunError(said(error)) from error


@dataclass(frozen=True)
class RunFiles:
    """Files of the run in ``folder``; ``name`` is the step's, ``figures`` are those of steps before it."""

    name: str
    job: Job
    plan: Plan
    folder: Path
    figures: Mapping[str, float]
    say: Callable[[str], None]

    @property
    def trust(self) -> Trust:
        return trust(self.job)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def strategy(self) -> Path:
        return self.folder / "strategy"

    def last(self) -> Path:
        """The newest complete checkpoint of this run."""
        found = latest(self.checkpoints, self.trust)
        if found is None:
            raise RunError(f"{self.checkpoints}: no complete checkpoint; the step 'save' makes one")
        return found

    def source(self, named: str | None) -> Path:
        """The checkpoint ``named``, which may be the best of this run, else its newest."""
        if named == BEST:
            return best(self.checkpoints, self.trust)
        return self.last() if named is None else Path(named)

    def maker(self, thing: str) -> tuple[str, Step] | None:
        """The last step before this one that leaves ``thing``, after its name."""
        found = None
        for name, step in self.job.steps.items():
            if name == self.name:
                break
            if VERBS[step.kind].leaves == thing:
                found = name, step
        return found

    def suffix(self, thing: str) -> str:
        """What tells this step's place from that of the first that leaves ``thing`` in the run's folder."""
        first = next(n for n, s in self.job.steps.items() if VERBS[s.kind].leaves == thing)
        return "" if self.name == first else f"-{self.name}"
