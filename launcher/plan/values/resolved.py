"""A request with what its files and its data decided, and where each value came from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.job.schema.job import Job


@dataclass(frozen=True)
class Resolved:
    """``job`` has the values; the other fields say where they came from.

    They are not part of the job: it travels through copies, which would lose them.

    ``epoch_samples``: the samples of an epoch, if ``train.steps`` was computed from ``train.epochs``.
    """

    job: Job
    epoch_samples: int | None = None

    def of(self, job: Job) -> Resolved:
        """Returns the same provenance for a changed ``job``."""
        return self if job is self.job else replace(self, job=job)
