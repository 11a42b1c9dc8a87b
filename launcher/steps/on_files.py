"""Runs the steps of one process with a whole model, and those on files, in the order of the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import RunError, said
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.steps import module
from launcher.steps.files.run_files import RunFiles


def run(
    names: tuple[str, ...],
    job: Job,
    plan: Plan,
    folder: Path,
    results: Mapping[str, float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Carry out ``names``; ``results`` are the figures of the steps before. Returns new figures."""
    out: dict[str, Any] = {}
    for name in names:
        step = job.steps[name]
        files = RunFiles(name, job, plan, folder, figures={**results, **out}, say=say)
        try:
            out |= module(step).run_on_files(step, files)
        except (ValueError, OSError) as error:
            raise RunError(f"{name}: {said(error)}") from error
    return out
