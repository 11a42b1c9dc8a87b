"""Refusals before anything is started or written: first without plan and torch, then with the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launcher.data.checks import absent
from launcher.errors import Problem, RequestError, refuse
from launcher.job.schema.data import Chat, Text
from launcher.job.schema.job import Job
from launcher.optional import lacking, metric_loggers
from launcher.plan.plan import Plan
from launcher.plan.values.note import Note
from launcher.plan.verbs import output, verb, writes
from launcher.run import launch, process_limits, resume, status_record, submit_to_cluster, write_layout_files
from launcher.run.resolved_request import ResolvedRequest, run_location
from launcher.runtime import run_folder
from launcher.steps import module
from launcher.steps.file_checks import FileChecks


def before_plan(run: ResolvedRequest) -> list[Problem]:
    """Returns problems of a request besides its settings that can be found without a plan."""
    job = run.job
    key, where = run_location(job)
    writable = run_folder.check_writable(where, key)
    return [
        *([writable] if writable else []),
        *process_limits.problems(job),
        *launch.problems(job, run.outer),
        *submit_to_cluster.problems(job, run.outer),
        *resume.named(job, run.overrides, run.done),
        *_step_problems(run),
        *(absent(job.data) if _reads(job) else []),
        *write_layout_files.unwritable(job),
        *_cache(job),
        *(_of_loggers(job) if job.logger.services else []),
        *_of_others(run),
    ]


def _of_loggers(job: Job) -> list[Problem]:
    """Returns problems of metric services.

    The optional part, or a package that a service needs, is not installed.
    """
    return lacking("metric_loggers", "logger") or [*metric_loggers.problems(job)]


def _of_others(run: ResolvedRequest) -> list[Problem]:
    """Reports a drill in a folder that has checkpoints of another training: the drill might damage them."""
    if run.job.debug.drill is None or run.job.run_dir is None:
        return []
    at = Path(run.job.run_dir)
    if not any((at / "checkpoints").glob("step-*")) or status_record.config_of(at) == run.config:
        return []
    text = f"{at}: contains checkpoints of another training, which a drill may damage; use a new folder"
    return [Problem("run_dir", text, "run_dir=null")]


def _cache(job: Job) -> list[Problem]:
    """Returns problems of a cache folder that cannot be written."""
    data = job.data
    if not isinstance(data, Text | Chat) or data.cache is None:
        return []
    if isinstance(data, Text) and data.tokenizer == "bytes":
        return []
    problem = run_folder.check_writable(Path(data.cache), "data.cache", "the tokens of data.path")
    return [problem] if problem else []


def after_plan(run: ResolvedRequest, plan: Plan, shown: bool) -> tuple[list[Note], list[str]]:
    """Returns notes on the checkpoints that the run resumes from, and remarks. Raises ``RequestError``.

    ``shown``: the plan is only shown. The run may start on another machine, so files that are missing on this
    one are remarks, not problems.
    """
    if shown:
        notes = resume.shown(run.job, plan, run.overrides)
        checks = [FileChecks(name, run.job, shown=True) for name in run.job.steps]
        refuse([p for at in checks for p in _unfit(at, plan)])
        return notes, _answers(checks, "pending")
    problems, notes = resume.resume_problems(run.job, plan, run.overrides, run.done)
    for at in _file_checks(run.job):
        if at.name not in run.done:
            problems += _unfit(at, plan)
    refuse(problems)
    return notes, []


def previews(job: Job) -> list[str]:
    """Returns what each transform of an existing checkpoint will read. Raises ``RequestError``."""
    return _answers([FileChecks(name, job, shown=True) for name in job.steps], "preview")


def _step_problems(run: ResolvedRequest) -> list[Problem]:
    """Returns problems of the files that steps name, except steps that are done.

    A file that an earlier step may write is checked only when the step starts. Files are compared only if
    each can be read.
    """
    problems: list[Problem] = []
    for at in _file_checks(run.job):
        if at.name not in run.done and (check := _part(at, "check")):
            problems += check(run.job.steps[at.name], at)
    return problems


def _file_checks(job: Job) -> Iterator[FileChecks]:
    """Yields the checks of each step, with the places where earlier steps write files."""
    written: list[Path] = []
    for name, step in job.steps.items():
        yield FileChecks(name, job, tuple(written))
        if writes(step):
            own = Path(job.runs) / job.name if job.run_dir is None else Path(job.run_dir)
            written.append(own)
        if (path := output(step)) is not None:
            written.append(Path(path))


def _unfit(at: FileChecks, plan: Plan) -> list[Problem]:
    problems = _part(at, "plan_problems")
    return problems(at.job.steps[at.name], at, plan) if problems else []


def _part(at: FileChecks, name: str) -> Callable[..., Any] | None:
    """Returns the function ``name`` in the module of the verb, if it has one.

    Imports no module without checks.
    """
    step = at.job.steps[at.name]
    return getattr(module(step), name, None) if verb(step).checks else None


def _answers(checks: list[FileChecks], function: str) -> list[str]:
    """Collects the answers of all steps; raises all of their refusals at once."""
    out: list[str] = []
    problems: list[Problem] = []
    for at in checks:
        tell = _part(at, function)
        try:
            out += tell(at.job.steps[at.name], at) if tell else []
        except RequestError as error:
            problems += error.problems
    if problems:
        raise RequestError(tuple(problems))
    return out


def _reads(job: Job) -> bool:
    """Returns true if a step opens the request's data. Steps that train copies of the run open other data."""
    return any(not verb(step).copies for step in job.steps.values())
