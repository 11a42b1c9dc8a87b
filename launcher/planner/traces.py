"""What plans of one model share: reading it, its forward on the ranks of ``tp``, trying its schedule."""

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
    """For many plans of requests that differ in anything: what was found is found no second time.

    ``own``: a class of the user's own is read once too, and not anew for each plan. ``keeps_messages``: as
    ``TracedModel`` has it, for a runtime that is not the torch that is here. ``shallow``: equal layers of a
    deep model are not followed one by one.
    """

    def __init__(self, own: bool = True, keeps_messages: bool | None = None, shallow: bool = False) -> None:
        self._own = own
        self.shallow = shallow
        self.keeps_messages = keeps_messages
        self._reads: dict[str, ReadOnce] = {}
        self._followed: dict[Any, Followed] = {}
        self._rated: dict[str, Problem | None] = {}

    def rated(self, key: Any, rate: Callable[[], Problem | None]) -> Problem | None:
        """What ``rate`` finds wrong with a schedule; ``key``: all that it hangs on."""
        key = repr(key)
        if key not in self._rated:
            self._rated[key] = rate()
        return self._rated[key]

    def read(self, job: Job, build: Callable[[], nn.Module]) -> ModelRead:
        """As ``trace_model.read``."""
        key = repr((job.model, job.seed, job.train.precision, job.parallel.deferred_init))
        return self._reads.setdefault(key, ReadOnce(self._own))(job, build)

    def followed(self, key: Any, job: Job, follow: Callable[[], Followed]) -> Followed:
        """What ``follow`` finds; ``key``: all that it hangs on besides what is asked of the model here.

        Operators over device matrices, and whole graphs of a compiler, need the model that was followed.
        """
        if over_device_matrix(job) or job.train.compile is not None:
            return follow()
        asked = (job.model, job.seed, job.train.precision, job.parallel.operators, job.parallel.recompute)
        key = (asked, job.parallel.param_strategy, job.parallel.pipeline.seq_split, key)
        key = repr((*key, planned_kind()))
        if key not in self._followed:
            self._followed[key] = follow()
        return self._followed[key]
