"""The status of a run in its folder: files written at the start, ``status.json`` until the end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.checkpoint.layout.derive_strategy import strategy_of_plan
from launcher.checkpoint.layout.strategy_file import dump
from launcher.checkpoint.tensorfile.disk import clear, write_text
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.errors import error_text
from launcher.job import targets
from launcher.job.schema import redact
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.show.plan_json import as_json
from launcher.plan.show.text import text
from launcher.run.lost_outputs import steps_to_repeat
from launcher.run.plan_pictures import pictures
from launcher.runtime import code_versions, run_folder
from launcher.runtime.cluster import launch_env
from launcher.runtime.faults import Interrupted, Preempted
from launcher.untrusted.files import open_folder, read_text

_log = logging.getLogger(__name__)


@dataclass
class RunStatus:
    """The state of a run, written after every change. ``steps``: the finished steps; ``results``: theirs.

    ``before``: how the previous start ended; ``running`` if it was killed. ``lost``: lines on outputs of
    earlier starts that no longer exist. The status is written through a descriptor of ``run``, as the folder
    may be moved and replaced during the run; ``close`` closes it.
    """

    run: Path
    overrides: tuple[str, ...]
    steps: tuple[str, ...] = ()
    results: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    before: str | None = None
    lost: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._opened: int | None = None
        with suppress(
            FileNotFoundError, NotADirectoryError
        ):  # a request that is only checked has no folder yet
            self._opened = open_folder(self.run)

    def close(self) -> None:
        """Closes the descriptor; later writes use the path of ``run``."""
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None

    def say(self, status: str, **more: Any) -> None:
        """Writes the status; while the run is running, reserves space for the next one."""
        job = launch_env.job()
        outer = {"job": job} if job else {}
        run_folder.write_status(
            self.run, self._opened, status=status, **more, metrics=self.results, seconds=self.seconds,
            steps=self.steps, overrides=self.overrides, plan="plan.json", **outer,
        )  # fmt: skip
        if status == "running":
            run_folder.reserve_status(self.run, self._opened)

    def add(self, steps: tuple[str, ...], results: dict[str, Any]) -> None:
        self.steps += steps
        self.results |= results
        self.say("running")

    def fail(self, error: BaseException) -> None:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        status = "failed"
        if isinstance(error, Preempted):
            status = "preempted"
        elif isinstance(error, Interrupted | KeyboardInterrupt):
            status = "interrupted"
        try:
            self.say(status, error=line)
        except OSError as more:  # the failure itself is what must be reported
            if self.run.is_dir():
                _log.warning("the status %s could not be written: %s", status, error_text(more))

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 1)


def reopen(run: Path, overrides: Sequence[str], job: Job, config: str) -> RunStatus:
    """Returns the record of ``run``.

    A second start with the same configuration continues after the done steps. Done steps whose outputs no
    longer exist are left out.
    """
    record = RunStatus(run, tuple(map(redact.identity, overrides)))
    recorded = run_folder.read_status(run)
    record.before = None if recorded is None else recorded.get("status")
    if job.checkpoint.resume == "never" or recorded is None or config_of(run) != config:
        return record
    steps, record.results = tuple(recorded.get("steps", ())), dict(recorded.get("metrics") or {})
    repeated, record.lost = steps_to_repeat(job, run, steps, record.results)
    record.steps = tuple(name for name in steps if name not in repeated)
    return record


def begun(home: Path, config: str) -> Path | None:
    """Returns the run below ``home`` that this job has begun, if its outer launcher restarts it."""
    job = launch_env.job()
    if job is None or not launch_env.again() or not home.is_dir():
        return None
    numbered = (p for p in home.iterdir() if p.name.isdecimal())
    for run in sorted(numbered, key=lambda p: int(p.name), reverse=True):
        if config_of(run) == config and (run_folder.read_status(run) or {}).get("job") == job:
            return run
    return None


def config_of(run: Path) -> str | None:
    """Returns the complete configuration of the previous start; ``None`` if there was none."""
    return _reads(run / "config.yaml")


def _reads(file: Path) -> str | None:
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError):
        return None


def done(job: Job, overrides: Sequence[str], config: str) -> tuple[str, ...]:
    """Returns the steps that are already done in the folder of ``job``; writes nothing there."""
    if job.run_dir is None:
        return ()
    with closing(reopen(Path(job.run_dir), overrides, job, config)) as record:
        return record.steps


def write_versions(run: Path, job: Job, before: str | None) -> None:
    """Appends an entry to ``versions.json`` if the code differs from that of the previous start.

    ``before``: how that start ended. Changes cause a warning, but do not stop the run.
    """
    then = code_versions.read(run)
    now = code_versions.code_versions(Path.cwd(), targets.named(job.model_dump(mode="json", by_alias=True)))
    if then and (changed := code_versions.changes(then[-1], now)):
        since = "it was submitted" if before in ("submitted", "written") else "its last start"
        _log.warning("the code of this run has changed since %s: %s", since, changed)
    if not then or then[-1] != now:
        write_text(run / code_versions.NAME, code_versions.as_json((*then, now)))


def write_start_files(run: Path, plan: Plan, command: Sequence[str], config: str, anew: bool) -> None:
    """Writes the files that describe the run.

    Removes errors of an earlier start; with ``anew`` its strategy files too.
    """
    stale = [*run.glob("errors/rank*.json")]
    if anew:
        stale += run.glob("strategy/*.json")
    for file in stale:
        clear(file)

    run_folder.write_command(run, [redact.text(word) for word in command])
    files = {
        "config.yaml": config,
        "plan.txt": text(plan) + "\n",
        "plan.json": as_json(plan),
        **pictures(plan),
    }
    if plan.graph is not None:
        make_folder(run / "graphs")
    for name, content in files.items():
        if _reads(run / name) != content:  # so that a resumed run needs no space for unchanged files
            write_text(run / name, content)
    dump(strategy_of_plan(plan), run / "strategy")
