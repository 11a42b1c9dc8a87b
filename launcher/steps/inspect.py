"""``inspect``: shows as a table which ranks have which shards of a checkpoint."""

from __future__ import annotations

from launcher.checkpoint.manifest import unvouched
from launcher.checkpoint.read import open_checkpoint
from launcher.checkpoint.verify import inspect
from launcher.errors import Problem
from launcher.job.schema.steps import Inspect
from launcher.steps.file_checks import FileChecks, RunFiles


def check(step: Inspect, at: FileChecks) -> list[Problem]:
    return at.source_problems(step.src, lambda src: open_checkpoint(src, at.trust))


def run_on_files(step: Inspect, run: RunFiles) -> dict[str, float]:
    src = run.source(step.src)
    table = inspect(open_checkpoint(src, run.trust).strategy).removesuffix("\n")
    run.say(f"inspect: {src}: {table}")
    if doubt := unvouched(src, run.trust):
        run.say(f"inspect: {src}{doubt}")
    return {}
