"""``count``: how many numbers a model has, on its ranks or in a checkpoint. The launcher does not know this verb."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from launcher.checkpoint.read import open_checkpoint
from launcher.errors import Problem
from launcher.job.schema.base import Settings
from launcher.job.schema.job import Job
from launcher.plan.verbs import CHECKPOINT, Verb, Where
from launcher.steps.file_checks import FileChecks, RunFiles

if TYPE_CHECKING:
    from launcher.runtime.training.session import Session


class Count(Settings):
    kind: Literal["count"] = "count"
    of: Literal["run", "checkpoint"] = "run"
    src: str | None = None


def _where(step: Count) -> Where:
    return "ranks" if step.of == "run" else "files"


def _needs(step: Count) -> str:
    return CHECKPOINT if step.of == "checkpoint" else ""


ROW = Verb(Count, "tests.steps.count_verb", _where, _needs, source="src", checks=True)


def check(step: Count, at: FileChecks) -> list[Problem]:
    src = step.src
    return [] if src is None or at.later(src) else at.problems("src", lambda: open_checkpoint(Path(src), at.trust))


def run_on_ranks(step: Count, session: Session, job: Job) -> str:
    mine = sum(p.numel() for _, p in session.model.trainable())
    session.results["mine"] = mine
    return f"{mine} numbers on rank {session.world.rank}"


def run_on_files(step: Count, run: RunFiles) -> dict[str, float]:
    entries = open_checkpoint(run.source(step.src), run.trust).strategy.only("param").entries
    counted = sum(prod(e.spec.shape) for e in entries.values())
    run.say(f"{run.name}: {counted} numbers")
    return {"counted": counted}
