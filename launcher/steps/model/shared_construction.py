"""What ranks build from: drawn by each of them, or once for all that are forked afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.job.schema.job import Job
from launcher.parallel.blueprint import Blueprint, blueprint
from launcher.parallel.deferred_init import fill
from launcher.parallel.model_state.module_globals import GlobalsSnapshot
from launcher.plan.plan import Plan
from launcher.planner import own_classes
from launcher.planner.plan_job import builder, inputs

_log = logging.getLogger(__name__)


def draw(job: Job, plan: Plan) -> Blueprint:
    """For one build. Nothing of it has numbers, so that ranks may be forked afterwards."""
    model, whole = fill.from_constructor(builder(job), plan)
    return blueprint(model, whole, plan, inputs(job, plan.sizes.micro_batch))


class Drawings:
    """Blueprints by plan, each for one build of every rank forked afterwards: it takes a rank's own copy.

    Each is drawn as if it were the first: what constructors count in Python starts anew.
    """

    def __init__(self) -> None:
        self._of: list[tuple[Plan, list[Blueprint]]] = []
        self._starts: dict[tuple[str, ...], GlobalsSnapshot] = {}

    def add(self, job: Job, plan: Plan, builds: int = 1) -> None:
        """For so many ``builds`` of ``plan``.

        Where it fails each rank draws for itself, and tells why it cannot.
        """
        try:
            self._of.append((plan, [self._drawn(job, plan) for _ in range(builds)]))
        except Exception as error:
            _log.debug("left to the ranks: %s", error)

    def take(self, job: Job, plan: Plan) -> Blueprint:
        """What was drawn for ``plan`` and is not taken yet, or else one drawn now."""
        left = next((each for p, each in self._of if p is plan and each), None)
        return left.pop() if left else self._drawn(job, plan)

    def _drawn(self, job: Job, plan: Plan) -> Blueprint:
        files = tuple(own_classes.files(job))
        if files in self._starts:
            self._starts[files].restore()
        else:
            self._starts[files] = GlobalsSnapshot(files)
        return draw(job, plan)

    @contextmanager
    def as_first(self, job: Job) -> Iterator[None]:
        """A construction in it begins with what constructors count in Python as the first one did."""
        files = tuple(own_classes.files(job))
        now = GlobalsSnapshot(files)
        if files in self._starts:
            self._starts[files].restore()
        try:
            yield
        finally:
            now.restore()

    def clear(self) -> None:
        """The ranks have been forked, and their work is done."""
        self._of.clear()
        self._starts.clear()
