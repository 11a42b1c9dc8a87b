"""Looks at the files that a step names before anything is started: heads and manifests, no tensor."""

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
"""Raises for what is wrong."""


@dataclass(frozen=True)
class FileChecks:
    """One step of ``job``.

    ``written`` is where the steps before it leave files; ``shown``: nothing will be started.
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
        """Whether what is at ``path`` may be there only when the steps before have written theirs."""
        if path is None:
            return False
        if path == BEST and of_best(self.job.steps[self.name]):
            return True
        here = _real(path)
        return any(here.is_relative_to(_real(p)) or _real(p).is_relative_to(here) for p in self.written)

    def here(self, path: str | None) -> bool:
        """Whether there is a path, to be looked at now."""
        return path is not None and not self.later(path)

    def problems(self, field: str, look: Look) -> list[Problem]:
        """What ``look`` complains about, as problems of the setting ``field``."""
        try:
            look()
        except RequestError as error:
            return [*error.problems]
        except (ValueError, OSError) as error:
            return [Problem(f"{self.key}.{field}", _own(said(error), field))]
        return []

    def unwritable(self, field: str, path: str | None) -> list[Problem]:
        """Why no file could be made at ``path``, if one is named."""
        if path is None:
            return []
        problem = folder.check_writable(Path(path).parent, f"{self.key}.{field}", "the folder of this output")
        return [problem] if problem else []


def _own(text: str, field: str) -> str:
    """Without the name that a function has for what the step calls ``field``."""
    for name in (field, "src_strategy", "src_strategy_dirs", "src_strategy_file", "dst_strategy_file"):
        text = text.removeprefix(f"{name}: ")
    return text


def _real(path: str | Path) -> Path:
    """Without links; where they go in circles ``Path.resolve`` would raise."""
    return Path(os.path.realpath(path))
