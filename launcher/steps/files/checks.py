"""Checks the files that a step names before anything starts: headers and manifests, no tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, RequestError, said
from launcher.job.schema.job import Job
from launcher.job.schema.run_paths import BEST
from launcher.plan.values.trust import Trust, trust
from launcher.plan.verbs import of_best
from launcher.runtime import folder

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
        """Whether ``path`` may come into existence only when earlier steps write their files."""
        if path is None:
            return False
        if path == BEST and of_best(self.job.steps[self.name]):
            return True
        here = _real(path)
        return any(here.is_relative_to(_real(p)) or _real(p).is_relative_to(here) for p in self.written)

    def here(self, path: str | None) -> bool:
        """Whether a path is named and can be checked now."""
        return path is not None and not self.later(path)

    def problems(self, field: str, look: Look) -> list[Problem]:
        """The errors that ``look`` raises, as problems of the setting ``field``."""
        try:
            look()
        except RequestError as error:
            return [*error.problems]
        except (ValueError, OSError) as error:
            return [Problem(f"{self.key}.{field}", _own(said(error), field))]
        return []

    def unwritable(self, field: str, path: str | None) -> list[Problem]:
        """Why no file could be created at ``path``, if one is named."""
        if path is None:
            return []
        problem = folder.check_writable(Path(path).parent, f"{self.key}.{field}", "the folder of this output")
        return [problem] if problem else []


def _own(text: str, field: str) -> str:
    """``text`` without a leading name of ``field``."""
    for name in (field, "src_strategy", "src_strategy_dirs", "src_strategy_file", "dst_strategy_file"):
        text = text.removeprefix(f"{name}: ")
    return text


def _real(path: str | Path) -> Path:
    """The path without links; ``Path.resolve`` would raise for circular ones."""
    return Path(os.path.realpath(path))
