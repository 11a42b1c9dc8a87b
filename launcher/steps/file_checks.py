"""The files that a step reads and writes, checked before it starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

from launcher.checkpoint.manifest import NoManifest
from launcher.checkpoint.read import best_checkpoint
from launcher.checkpoint.store import check_outside_checkpoints, latest, newest_in, newest_of_runs
from launcher.errors import Problem, RequestError, RunError, error_text
from launcher.job.schema.job import Job
from launcher.job.schema.paths import BEST, RUN, TAKEN
from launcher.job.schema.steps import Step
from launcher.plan.plan import Plan
from launcher.plan.resolve.encryption import Trust, trust
from launcher.plan.verbs import VERBS, output, reads_best
from launcher.runtime import run_folder

Kind = Literal["file", "folder"]
"""What an output is. A folder may be replaced."""
_ANOTHER = "name another place"
Look = Callable[[], object]
"""Raises if something is wrong."""


@dataclass(frozen=True)
class FileChecks:
    """Checks for one step of ``job``.

    ``written``: where earlier steps leave files; ``shown``: the request is only shown, nothing will start.
    """

    name: str
    job: Job
    written: Collection[Path] = ()
    shown: bool = False

    @property
    def key(self) -> str:
        return f"steps.{self.name}"

    @property
    def trust(self) -> Trust:
        return trust(self.job)

    def later(self, path: str | Path | None) -> bool:
        """Returns true if ``path`` may exist only after earlier steps have written their files."""
        if path is None:
            return False
        if path == BEST and reads_best(self.job.steps[self.name]):
            return True
        here = _real(path)
        return any(here.is_relative_to(_real(p)) or _real(p).is_relative_to(here) for p in self.written)

    def here(self, path: str | None) -> bool:
        """Returns true if ``path`` is named and can be checked now."""
        return path is not None and not self.later(path)

    def source_problems(self, src: str | None, look: Callable[[Path], object]) -> list[Problem]:
        """Returns the errors that ``look`` raises for ``src``; none if earlier steps have yet to write it."""
        if src is None or self.later(src):
            return []
        path = Path(src)
        return self.problems("src", lambda: look(path))

    def problems(self, field: str, look: Look) -> list[Problem]:
        """Returns the errors that ``look`` raises, as problems of the setting ``field``."""
        try:
            look()
        except RequestError as error:
            return [*error.problems]
        except NoManifest as error:
            return [no_manifest(f"{self.key}.{field}", error)]
        except (ValueError, OSError) as error:
            return [Problem(f"{self.key}.{field}", _own(error_text(error), field))]
        return []

    def unwritable(self, field: str, path: str | None, kind: Kind) -> list[Problem]:
        """Returns problems that prevent an output at ``path``.

        The content of an existing folder is not checked. There are none without a path, or for a path in the
        run folder.
        """
        if path is None or path.startswith(RUN):
            return []
        key, label = f"{self.key}.{field}", "the folder of this output"
        if kind == "file":
            problem = run_folder.check_file(Path(path), key, label)
        elif os.path.lexists(path) and not Path(path).is_dir():
            problem = Problem(key, f"{path}: is not a folder")
        else:
            problem = run_folder.check_writable(Path(path).parent, key, label)
        problem = problem or next(self._overlaps(key, path, kind), None)
        return [problem] if problem else self.problems(field, lambda: check_outside_checkpoints(Path(path)))

    def _overlaps(self, key: str, path: str, kind: Kind) -> Iterator[Problem]:
        """Yields problems of an output that overlaps other outputs, or contains the current folder.

        Without this check the step would fail, or replace those files, only after the training.
        """
        here, home = _real(path), _home(self.job)
        if kind == "folder" and _real(".").is_relative_to(here):
            yield Problem(
                key, f"{path}: this folder would be replaced, and the current folder is in it; name a new one"
            )
        if home.is_relative_to(here):
            yield Problem(key, f"{path}: this folder contains the folder of this run, {home}; {_ANOTHER}")
        if here.is_relative_to(home) and _used_by_run(here.relative_to(home), self.job):
            yield Problem(key, f"{path}: this run writes its own files there; {_ANOTHER}")
        for other, there in self._earlier_outputs():
            if here.is_relative_to(there) or there.is_relative_to(here):
                yield Problem(key, f"{path}: steps.{other} writes there; {_ANOTHER}")

    def _earlier_outputs(self) -> Iterator[tuple[str, Path]]:
        """Yields the outputs that earlier steps name."""
        for name, step in self.job.steps.items():
            if name == self.name:
                return
            path = output(step) or getattr(step, "to", None)
            if path is not None and not path.startswith(RUN):
                yield name, _real(path)


def _home(job: Job) -> Path:
    """Returns the folder of the run, or the one that gets a folder for each run of this name."""
    return _real(Path(job.runs, job.name) if job.run_dir is None else job.run_dir)


def _used_by_run(inside: Path, job: Job) -> bool:
    """Returns true if the run may write at ``inside``, a path in the folder ``_home``."""
    if job.run_dir is None:
        return inside.name.isdecimal() and len(inside.parts) == 1 and not (_home(job) / inside).exists()
    if inside.parts[0] == "checkpoints" and any(VERBS[s.kind].checkpoints for s in job.steps.values()):
        return True
    return len(inside.parts) == 1 and inside.name in TAKEN and inside.name != "transformed"


def _own(text: str, field: str) -> str:
    """Returns ``text`` without a leading name of ``field``."""
    for name in (field, "src_strategy", "src_strategy_dirs", "src_strategy_file", "dst_strategy_file"):
        text = text.removeprefix(f"{name}: ")
    return text


def _real(path: str | Path) -> Path:
    """Returns the path without links; ``Path.resolve`` would raise for circular ones."""
    return Path(os.path.realpath(path))


def no_manifest(key: str, error: NoManifest) -> Problem:
    """Returns the problem of a setting that does not name a checkpoint.

    The cure is the newest one in the folder.
    """
    newest, text = newest_in(error.folder), "holds checkpoints, but is not one; the newest is"
    if newest is None:
        newest, text = newest_of_runs(error.folder), "holds runs; their newest checkpoint is"
    if newest is None:
        return Problem(key, str(error))
    return Problem(key, f"{error.folder}: {text} {newest}", f"{key}={quote(str(newest))}")


def best(checkpoints: Path, trust: Trust) -> Path:
    """Returns the best checkpoint. Raises ``RunError`` if none is recorded."""
    try:
        return best_checkpoint(checkpoints, trust)
    except (ValueError, OSError) as error:
        raise RunError(error_text(error)) from error


@dataclass(frozen=True)
class RunPaths:
    """The places of the run in ``folder`` where the step ``name`` reads and writes."""

    name: str
    job: Job
    folder: Path

    @property
    def trust(self) -> Trust:
        return trust(self.job)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def strategy(self) -> Path:
        return self.folder / "strategy"

    def last(self) -> Path:
        """Returns the newest complete checkpoint of this run."""
        newest = latest(self.checkpoints, self.trust)
        if newest is None:
            raise RunError(f"{self.checkpoints}: no complete checkpoint; the step 'save' writes one")
        return newest

    def source(self, named: str | None) -> Path:
        """Returns the checkpoint ``named``, which may be the best of this run, else its newest."""
        if named == BEST:
            return best(self.checkpoints, self.trust)
        return self.last() if named is None else Path(named)

    def maker(self, thing: str) -> tuple[str, Step] | None:
        """Returns the last earlier step that leaves ``thing``, as name and step."""
        maker = None
        for name, step in self.job.steps.items():
            if name == self.name:
                break
            if VERBS[step.kind].leaves == thing:
                maker = name, step
        return maker

    def suffix(self, thing: str) -> str:
        """Returns a suffix that separates this step's output from that of an earlier step.

        That is the first step that leaves ``thing``.
        """
        first = next(n for n, s in self.job.steps.items() if VERBS[s.kind].leaves == thing)
        return "" if self.name == first else f"-{self.name}"


@dataclass(frozen=True)
class RunFiles(RunPaths):
    """The same with all that the step needs to run; ``figures``: the results of earlier steps."""

    plan: Plan
    figures: Mapping[str, float]
    say: Callable[[str], None]
