"""One small file a verb: what refuses it before anything starts, and what happens, in order.

The work itself lives in ``runtime`` and ``checkpoint``. The row of a verb in ``launcher.plan.verbs`` names
its module, which has, as the row says, of these:

``run_on_ranks(step, session, job)``: every rank calls it; returns what is to be said of it, ``""`` for
nothing. ``run_on_files(step, run)``: in one process; ``run`` is a ``RunFiles``. Returns figures.
``copies(step, job, plan)`` and ``run_copies(step, world, copies, folder, drawn)``, in place of
``run_on_ranks``: what is trained of the run, each with its plan, and the training; ``BUILDS``: of each how
many models.

Where the row says ``checks``, it imports without torch and has ``check(step, at)``: what is wrong with the
step, before there is a plan; ``at`` is a ``FileChecks``. It may have ``fits(step, at, plan)``: the same, with
one. For what is only shown: ``preview(step, at)``, what it will do, and ``pending(step, at)``, what is seen
only when the run starts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from launcher.job.schema.steps import Step
from launcher.plan.verbs import verb

__all__ = ["on_files", "on_ranks"]


def module(step: Step) -> Any:
    """What carries out ``step``, imported."""
    return import_module(verb(step).module)
