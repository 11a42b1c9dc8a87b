"""``prepare``: writes text as files of tokens."""

from __future__ import annotations

from launcher.data.prepare import prepare as checks
from launcher.data.prepare.prepare import prepare
from launcher.data.prepare.progress import ProgressReporter
from launcher.errors import Problem
from launcher.job.schema.steps import Prepare
from launcher.steps.file_checks import FileChecks, RunFiles


def check(step: Prepare, at: FileChecks) -> list[Problem]:
    problems = checks.problems(step, at.key)
    if any(problem.key == f"{at.key}.dst" for problem in problems):
        return problems
    return [*problems, *at.unwritable("dst", step.dst, "folder")]


def run_on_files(step: Prepare, run: RunFiles) -> dict[str, float]:
    with ProgressReporter(run.job.logger.progress, run.say) as speed:
        done = prepare(step, f"steps.{run.name}", run.say, speed)
    run.say(f"prepare: {done.text(step.dst)}")
    return {"prepared_tokens": done.tokens, "prepared_documents": done.documents, "left_out": done.skipped}
