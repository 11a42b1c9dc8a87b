"""Finds the done steps of a run whose outputs no longer exist, so that a second start does them again."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.checkpoint.store import complete, step_folder
from launcher.job.schema.job import Job
from launcher.job.schema.paths import place
from launcher.job.schema.steps import Calibrate, Certify, Export, MergeStrategies, Predict, Prepare, Transform
from launcher.plan.step_order import Phase, phases
from launcher.plan.verbs import verb
from launcher.steps import export, transform
from launcher.steps.file_checks import RunPaths


def steps_to_repeat(
    job: Job, run: Path, done: Collection[str], results: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the steps of ``done`` that must be done again, and a line for each output that is lost.

    Steps that run together are repeated together; later steps whose outputs still exist are not.
    """
    repeated: list[str] = []
    lines: list[str] = []
    for phase in phases(job.steps):
        mine = [name for name in phase.steps if name in done]
        lost = {name: path for name in mine for path in _lost(RunPaths(name, job, run), results)}
        if lost:
            repeated += mine
            lines += _lines(lost, phase)
    return tuple(repeated), tuple(lines)


def _lines(lost: Mapping[str, Path], phase: Phase) -> Iterator[str]:
    steps = "this step is" if len(phase.steps) == 1 else f"{', '.join(phase.steps)} are"
    paths = dict.fromkeys(lost.values())
    for path in paths:
        name = next(n for n in lost if lost[n] == path)
        state = "is incomplete" if os.path.lexists(path) else "no longer exists"
        yield f"{name}: {path} {state}, so {steps} done again"


def _lost(run: RunPaths, results: Mapping[str, Any]) -> Iterator[Path]:
    """Yields the output of a done step if it does not exist, is incomplete, or is an empty folder."""
    step = run.job.steps[run.name]
    saved = results.get("saved_step")
    if verb(step).checkpoints and type(saved) is int:
        folder = step_folder(run.checkpoints, saved)
        if not complete(folder):
            yield folder
    elif (path := output_path(run)) is not None and not _exists(path):
        yield path


def output_path(run: RunPaths) -> Path | None:
    """Returns where the step writes; ``None`` if it writes nothing but checkpoints."""
    match step := run.job.steps[run.name]:
        case Export():
            return export.export_folder(run)
        case Transform():
            return transform.written(run)
        case MergeStrategies():
            merged = sorted(run.strategy.glob("merged.*"))
            return Path(step.dst) if step.dst else next(iter(merged), run.strategy / "merged.json")
        case Predict() | Calibrate():
            return Path(place(step.to, str(run.folder)))
        case Prepare():
            return Path(step.dst)
        case Certify():
            return run.folder / "certificate.json"
        case _:
            return None


def _exists(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else os.path.lexists(path)
