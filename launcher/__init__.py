"""Declarative training launches: ask (``Job``), decide (``Plan``), do (``run_job``).

Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.errors import RequestError
    from launcher.job.schema.job import Job
    from launcher.plan.plan import Plan
    from launcher.planner.plan_job import plan_job
    from launcher.run.run import run_job

__all__ = ["Job", "Plan", "RequestError", "__version__", "plan_job", "run_job"]

__version__ = "0.1.0"

_HOMES = {
    "Job": "job.schema.job",
    "Plan": "plan.plan",
    "RequestError": "errors",
    "plan_job": "planner.plan_job",
    "run_job": "run.run",
}


def __getattr__(name: str) -> Any:
    """Imports each name when it is first used, so that ``Job`` does not pay for ``run_job``'s imports."""
    if name not in _HOMES:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"launcher.{_HOMES[name]}"), name)
