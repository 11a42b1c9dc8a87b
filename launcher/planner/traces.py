"""Caches what plans of one model share: reading it, its traced forward, trying its schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.settings.device_matrix import over_device_matrix
from launcher.planner.device_kernels import planned_kind
from launcher.planner.trace_model import Followed, ModelRead, ReadOnce

if TYPE_CHECKING:
    from torch import nn


class Traces:
    """Caches what many plans have in common; the requests may differ in anything.

    ``own``: a user's class is also read only once. ``keeps_messages``: as in ``TracedModel``, to plan for
    another torch than the installed one. ``shallow``: equal layers of a deep model are extrapolated.
    """

    def __init__(self, own: bool = True, keeps_messages: bool | None = None, shallow: bool = False) -> None:
        self._own = own
        self.shallow = shallow
        self.keeps_messages = keeps_messages
        self._reads: dict[str, ReadOnce] = {}
        self._followed: dict[Any, Followed] = {}
        self._rated: dict[str, Problem | None] = {}

    def rated(self, key: Any, rate: Callable[[], Problem | None]) -> Problem | None:
        """The problem that ``rate`` reports; ``key``: everything that it depends on."""
        key = repr(key)
        if key not in self._rated:
            self._rated[key] = rate()
        return self._rated[key]

    def read(self, job: Job, build: Callable[[], nn.Module]) -> ModelRead:
        """Like ``trace_model.read``."""
        key = repr((job.model, job.seed, job.train.precision, job.parallel.deferred_init))
        return self._reads.setdefault(key, ReadOnce(self._own))(job, build)

    def followed(self, key: Any, job: Job, follow: Callable[[], Followed]) -> Followed:
        """The result of ``follow``; ``key``: what it depends on besides the settings that are added here.

        Operators over device matrices and full compiler graphs are not cached: they need the traced model
        itself.
        """
        if over_device_matrix(job) or job.train.compile is not None:
            return follow()
        asked = (job.model, job.seed, job.train.precision, job.parallel.operators, job.parallel.recompute)
        key = (asked, job.parallel.param_strategy, job.parallel.pipeline.seq_split, key)
        key = repr((*key, planned_kind()))
        if key not in self._followed:
            self._followed[key] = follow()
        return self._followed[key]
