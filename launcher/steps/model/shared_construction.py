"""Constructs models for ranks: on each of them, or once before they are forked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.job.schema.job import Job
from launcher.parallel.deferred_init import fill
from launcher.parallel.deferred_init.fill import InitialTensors
from launcher.parallel.model_state.module_globals import GlobalsSnapshot
from launcher.parallel.parallel_model import Blueprint, blueprint
from launcher.parallel.trace.sample_values import TrialValues, using_trial_values
from launcher.plan.plan import Plan
from launcher.planner import user_classes
from launcher.planner.plan_job import builder, inputs
from launcher.planner.trial_samples import batches, samples

_log = logging.getLogger(__name__)


def draw(job: Job, plan: Plan) -> Blueprint:
    """Returns a blueprint for one build. It has no values yet, so ranks may be forked afterwards."""
    model, full_tensor = fill.from_constructor(builder(job), plan)
    with _trial_values(job, plan, full_tensor):
        return blueprint(model, full_tensor, plan, inputs(job, plan.sizes.micro_batch))


@contextmanager
def _trial_values(job: Job, plan: Plan, initial: InitialTensors) -> Iterator[None]:
    """Traces code that reads values with the first samples and the constructor's values, as the planner did.

    Zeros are no lengths of sequences, and no mask of columns that the constructor made.
    """
    if plan.leaves is None or not plan.observed.reads_values:
        yield
        return
    with using_trial_values(TrialValues(batches(samples(job)), initial.one_by_one())):
        yield


class SharedMetaModels:
    """Blueprints by plan; each rank that is forked afterwards builds from its own copy.

    Each blueprint is constructed as if it were the first: counters in the constructors' modules are reset.
    """

    def __init__(self) -> None:
        self._of: list[tuple[Plan, list[Blueprint]]] = []
        self._starts: dict[tuple[str, ...], GlobalsSnapshot] = {}

    def add(self, job: Job, plan: Plan, builds: int = 1) -> None:
        """Constructs blueprints for ``builds`` builds of ``plan``.

        If that fails, each rank tries to construct its own, and reports the error.
        """
        try:
            self._of.append((plan, [self._drawn(job, plan) for _ in range(builds)]))
        except Exception as error:
            _log.debug("left to the ranks: %s", error)

    def take(self, job: Job, plan: Plan) -> Blueprint:
        """Returns a blueprint of ``plan`` that is not yet taken, else a new one."""
        unused = next((each for p, each in self._of if p is plan and each), None)
        return unused.pop() if unused else self._drawn(job, plan)

    def _drawn(self, job: Job, plan: Plan) -> Blueprint:
        self.restart(job)
        return draw(job, plan)

    def restart(self, job: Job) -> None:
        """Sets the Python counters of the model's files back to those before the first construction."""
        files = tuple(user_classes.files(job))
        if files in self._starts:
            self._starts[files].restore()
        else:
            self._starts[files] = GlobalsSnapshot(files)

    @contextmanager
    def as_first(self, job: Job) -> Iterator[None]:
        """Starts constructions in the block with the Python counters of the first one."""
        now = GlobalsSnapshot(user_classes.files(job))
        self.restart(job)
        try:
            yield
        finally:
            now.restore()

    def clear(self) -> None:
        """Drops everything, once the forked ranks have finished."""
        self._of.clear()
        self._starts.clear()
