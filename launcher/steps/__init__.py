"""One small file per verb: its checks before anything starts, and its work, in order.

The work itself lives in ``runtime`` and ``checkpoint``. The row of a verb in ``launcher.plan.verbs`` names
its module, and says which of the following functions the module has:

``run_on_ranks(step, session, job)``: called by every rank; returns a message, or ``""`` for none.
``run_on_files(step, run)``: called in one process; ``run`` is a ``RunFiles``. Returns figures.
``copies(step, job, plan)`` and ``run_copies(step, world, copies, folder, drawn)``, in place of
``run_on_ranks``: the variants of the run to train, each with its plan, and their training; ``BUILDS``: the
models that each variant builds.

If the row says ``checks``, the module imports without torch and has ``check(step, at)``: the problems of the
step before there is a plan; ``at`` is a ``FileChecks``. It may have ``plan_problems(step, at, plan)``: the
problems that need a plan. For display only: ``preview(step, at)``, what the step will do, and
``pending(step, at)``, what is known only when the run starts.
"""

from __future__ import annotations

from typing import Any

from launcher.job.schema.steps import Step
from launcher.optional import import_part
from launcher.plan.verbs import verb

__all__ = ["export", "file_checks", "on_files", "on_ranks", "rank_entry_points", "sent_to_ranks", "transform"]


def module(step: Step) -> Any:
    """Imports the module that carries out ``step``. Raises ``RequestError`` if this installation lacks it."""
    return import_part(verb(step).module)
