"""The job: a complete request as one frozen value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from launcher.errors import Problem
from launcher.job.schema.base import Flag, Index, Settings
from launcher.job.schema.checkpoint import Checkpoint
from launcher.job.schema.cluster import Cluster
from launcher.job.schema.components import Data, Loss, Metric, Model, Optim, Schedule
from launcher.job.schema.debug import Debug
from launcher.job.schema.launch import Launch
from launcher.job.schema.logger import Logger
from launcher.job.schema.objective import CrossEntropy, named_metrics
from launcher.job.schema.parallel import Parallel
from launcher.job.schema.paths import FilePath
from launcher.job.schema.search import AUTO, AXES, Search, Sweep, lifted
from launcher.job.schema.security import Security
from launcher.job.schema.steps import Step, check_names, named
from launcher.job.schema.train import Train
from launcher.job.schema.user_class import Target

OPERATORS = "parallel.operators"
"""The key whose candidates may be names of options, that is, of files."""


class Job(Settings):
    """A request. It computes nothing: the plan resolves ``null`` and ``-1`` and leaves a note.

    A job that is made in Python may have steps with settings that the schema does not list.
    """

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: Index = 0
    deterministic: Flag = False
    recipe: str | None = None
    runs: FilePath = "runs"
    run_dir: FilePath | None = None
    show: Literal["config", "plan", "plan-full", "timeline", "search"] | None = None
    model: Model
    data: Data
    loss: Loss = CrossEntropy()
    metrics: Annotated[tuple[Metric, ...], BeforeValidator(named_metrics)] = ()
    optim: Optim
    schedule: Schedule
    train: Train
    parallel: Parallel = Parallel()
    search: Search = Search()
    sweep: Sweep = Sweep()
    launch: Launch = Launch()
    cluster: Cluster = Cluster()
    checkpoint: Checkpoint = Checkpoint()
    callbacks: tuple[Target, ...] = ()
    steps: Annotated[
        dict[str, SerializeAsAny[Step]], BeforeValidator(named), AfterValidator(check_names)
    ] = {}
    logger: Logger = Logger()
    debug: Debug = Debug()
    security: Security = Security()

    @model_validator(mode="before")
    @classmethod
    def _searched(cls, data: Any) -> Any:
        """Moves candidates that are written at their key to ``search``."""
        return lifted(data) if isinstance(data, Mapping) else data

    def value_problems(self) -> Iterator[Problem]:
        """Yields candidates of a search that their key does not accept."""
        for key, candidates in self.search.over.items():
            if key not in AXES or key == OPERATORS or not isinstance(candidates, tuple):
                continue
            bad = [c for c in candidates if c == AUTO or not _accepts(key, c)]
            if bad or not candidates:
                why = f"{bad[0]!r} is not a valid value of this key" if bad else "the list is empty"
                yield Problem(key, f"{list(candidates)!r}: {why}")


def _accepts(key: str, value: Any) -> bool:
    """Returns true if ``value`` alone is valid at ``key``, a setting of ``parallel``."""
    _, *parts = key.split(".")
    data = value
    for part in reversed(parts):
        data = {part: data}
    try:
        TypeAdapter(Parallel).validate_python(data)
    except ValidationError as error:
        return all(detail["loc"][: len(parts)] != tuple(parts) for detail in error.errors())
    return True
