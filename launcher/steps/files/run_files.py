"""What a step on files receives: the run's folder, its settings, and the results so far."""

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
    """The best checkpoint. Raises ``RunError`` if none is recorded."""
    try:
        return best_checkpoint(checkpoints, trust)
    except (ValueError, OSError) as error:
        raise RunError(said(error)) from error


@dataclass(frozen=True)
class RunFiles:
    """Files of the run in ``folder``; ``name``: the step's; ``figures``: results of earlier steps."""

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
        """The last earlier step that leaves ``thing``, as name and step."""
        found = None
        for name, step in self.job.steps.items():
            if name == self.name:
                break
            if VERBS[step.kind].leaves == thing:
                found = name, step
        return found

    def suffix(self, thing: str) -> str:
        """A suffix that separates this step's output from that of the first step that leaves ``thing``."""
        first = next(n for n, s in self.job.steps.items() if VERBS[s.kind].leaves == thing)
        return "" if self.name == first else f"-{self.name}"
