"""Where the steps of a run find and leave their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.store import latest
from launcher.errors import RunError
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Export, Step, Transform
from launcher.plan.values.trust import trust


@dataclass(frozen=True)
class Paths:
    """Files of the run in ``folder``; settings of a step that name others win."""

    folder: Path
    job: Job

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def strategy(self) -> Path:
        return self.folder / "strategy"

    def last(self) -> Path:
        """The newest complete checkpoint of this run."""
        found = latest(self.checkpoints, trust(self.job))
        if found is None:
            raise RunError(f"{self.checkpoints}: no complete checkpoint; the step 'save' makes one")
        return found

    def transformed(self) -> Path:
        step = self._step("transform")
        named = step.dst if isinstance(step, Transform) else None
        return Path(named) if named else self.folder / "transformed"

    def exported(self) -> Path:
        step = self._step("export")
        named = step.path if isinstance(step, Export) else None
        hf = isinstance(step, Export) and step.format == "hf"
        return Path(named) if named else self.folder / "exports" / ("hf" if hf else "model.safetensors")

    def source(self, named: str | None) -> Path:
        """The checkpoint ``named``, else the newest of this run."""
        return self.last() if named is None else Path(named)

    def export_source(self, step: Export) -> Path:
        """What it names, else the transformed checkpoint if a transform comes before, else the run's own last one."""
        if step.src is not None:
            return Path(step.src)
        kinds = [s.kind for s in self.job.steps.values()]
        early = "transform" in kinds and kinds.index("transform") < kinds.index("export")
        return self.transformed() if early else self.last()

    def _step(self, kind: str) -> Step | None:
        return next((s for s in self.job.steps.values() if s.kind == kind), None)
