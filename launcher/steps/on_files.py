"""Runs the steps that need one process with the full model, and those on files, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import RunError, error_text
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.steps import module
from launcher.steps.file_checks import RunFiles


def run(
    names: tuple[str, ...],
    job: Job,
    plan: Plan,
    folder: Path,
    results: Mapping[str, float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Runs the steps ``names``; ``results``: those of earlier steps. Returns new results."""
    out: dict[str, Any] = {}
    for name in names:
        step = job.steps[name]
        files = RunFiles(name, job, folder, plan, figures={**results, **out}, say=say)
        try:
            out |= module(step).run_on_files(step, files)
        except (ValueError, OSError) as error:
            raise RunError(f"{name}: {error_text(error)}") from error
    return out
