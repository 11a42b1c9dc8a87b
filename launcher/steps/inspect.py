"""``inspect``: shows as a table which ranks have which shards of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint.manifest import unvouched
from launcher.checkpoint.read import open_checkpoint
from launcher.checkpoint.verify import inspect
from launcher.errors import Problem
from launcher.job.schema.steps import Inspect
from launcher.steps.file_checks import FileChecks, RunFiles


def check(step: Inspect, at: FileChecks) -> list[Problem]:
    if step.src is None or at.later(step.src):
        return []
    src = Path(step.src)
    return at.problems("src", lambda: open_checkpoint(src, at.trust))


def run_on_files(step: Inspect, run: RunFiles) -> dict[str, float]:
    src = run.source(step.src)
    table = inspect(open_checkpoint(src, run.trust).strategy).removesuffix("\n")
    run.say(f"inspect: {src}: {table}")
    if doubt := unvouched(src, run.trust):
        run.say(f"inspect: {src}{doubt}")
    return {}
