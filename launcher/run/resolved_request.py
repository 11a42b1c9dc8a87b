"""Resolves what a request means for this process: its ranks, and whether it resumes a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import refuse
from launcher.job.schema import paths, redact
from launcher.job.schema.data import Chat, Text
from launcher.job.schema.job import Job
from launcher.plan.values.note import Note
from launcher.plan.values.resolved import Resolved
from launcher.planner.plan_job import resolve_job
from launcher.run import launch, memory_check, resume, status_record
from launcher.run.resume import with_last_checkpoint
from launcher.runtime import run_folder

if TYPE_CHECKING:
    from launcher.job.compose import Request
    from launcher.run.external_ranks.leader import FollowerRanks


@dataclass(frozen=True)
class Chosen:
    """``job`` with all settings decided, and notes; ``cluster``: the text of the refitted cluster file."""

    job: Job
    notes: tuple[Note, ...] = ()
    cluster: str = ""


def open_ended(job: Job) -> bool:
    """Returns true if any setting is left to the search for a layout."""
    return bool(job.search.over)


@dataclass(frozen=True)
class ResolvedRequest:
    """A resolved request.

    ``config``: the complete request as YAML, for the run folder; empty if the request is only shown.

    ``outer``: the number of ranks that an outer launcher has started; ``done``: the steps that earlier starts
    have done. ``notes``: changes to the request. ``vocabulary_from``: see ``Resolved``.
    """

    job: Job
    config: str
    overrides: Sequence[str]
    outer: int | None
    done: tuple[str, ...]
    notes: tuple[Note, ...] = ()
    vocabulary_from: str = ""

    @property
    def resolved(self) -> Resolved:
        return Resolved(self.job, vocabulary_from=self.vocabulary_from)


def resolve_request(request: Request, others: FollowerRanks | None, shown: bool = False) -> ResolvedRequest:
    """Resolves a request. Raises ``RequestError`` if the folder of an earlier start cannot be read.

    ``others``: the ranks of an outer launcher. ``shown``: the request is only shown and may run on another
    machine, so the ranks of an outer launcher and the results of earlier starts do not matter.
    """
    first, overrides = resolve_job(request.job), request.overrides
    if shown:
        job = memory_check.with_device_memory(first.job)
        return ResolvedRequest(job, "", overrides, None, (), vocabulary_from=first.vocabulary_from)
    from launcher.job.cures.report import as_yaml  # imports Hydra, which joining ranks do not need

    config, outer = as_yaml(request.data) + _hidden_line(request.data), launch.outer_size()
    requested = _again(first.job, config, others)
    here = launch.with_local_ranks(requested, outer)
    job = _with_cache(memory_check.with_device_memory(here))
    done = _done(job, config, overrides)
    job, finished = with_last_checkpoint(job)
    notes = (*launch.elastic_notes(requested, here), *finished)
    return ResolvedRequest(job, config, overrides, outer, done, notes, vocabulary_from=first.vocabulary_from)


def _hidden_line(data: Any) -> str:
    """Returns a comment with a digest of the hidden values, or "".

    With it, requests with other secrets differ.
    """
    identified = redact.identified(data)
    if identified == redact.values(data):
        return ""
    text = json.dumps(identified, sort_keys=True, default=str)
    return f"# {redact.digest(text)}: the hidden values\n"


def run_location(job: Job) -> tuple[str, Path]:
    """Returns the setting of the run's location, and the folder that it names."""
    return ("runs", Path(job.runs)) if job.run_dir is None else ("run_dir", Path(job.run_dir))


def _with_cache(job: Job) -> Job:
    """Returns ``job`` with the folder that caches tokens of its text, if it makes any."""
    if not isinstance(job.data, Text | Chat):
        return job
    from launcher.data.prepare.text_cache import with_cache  # imports tokenizers

    return with_cache(job)


def _again(job: Job, config: str, others: FollowerRanks | None) -> Job:
    """Keeps a job that its outer launcher restarts in its first run folder, whatever it resumed from."""
    run = others.folder(job.launch.elastic) if others is not None else None
    if run is None and job.run_dir is None:
        run = status_record.begun(Path(job.runs) / job.name, config)
    if run is None:
        return job
    anew = job.checkpoint.resume if resume.own(job, run) is None else "auto"
    checkpoint = job.checkpoint.model_copy(update={"resume": anew})
    return job.model_copy(update={"run_dir": str(run), "checkpoint": checkpoint})


def _done(job: Job, config: str, overrides: Sequence[str]) -> tuple[str, ...]:
    """Returns the steps in the job's folder that are already done."""
    if job.run_dir is None:
        return ()
    key, where = run_location(job)
    unwritable = run_folder.check_writable(where, key)
    foreign = run_folder.check_own_folder(where) if key == "run_dir" else None
    requested = paths.names(job.model_dump(mode="json"))
    refuse([p for p in [foreign or run_folder.check_entries(where, requested)] if p])
    return () if unwritable else status_record.done(job, overrides, config)
