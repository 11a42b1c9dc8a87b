"""Starts the loggers of a request, and checks that their packages are installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.optional_packages import install_command
from launcher.run.report.loggers.logger_process import LoggerProcess

PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),  # its SQLite files need the last two
    "trackio": ("trackio",),
}
NAMED_AFTER_THE_RUN = {"wandb": "project", "mlflow": "experiment", "trackio": "project"}


def refused(job: Job) -> Iterator[Problem]:
    """Problems of loggers whose packages are not installed."""
    for name, packages in PACKAGES.items():
        asked = getattr(job.logger, name)
        remote = name == "mlflow" and asked is not None and asked.tracking_uri is not None
        needed = packages[:1] if remote else packages
        lacks = [package for package in needed if find_spec(package) is None]
        if asked and lacks:
            shown = "true: " if asked is True else ""
            text = f"{shown}{lacks[0]} is not installed: {install_command(name)}"
            yield Problem(f"logger.{name}", text)


def begun(job: Job, run: Path, before: int) -> Iterator[LoggerProcess]:
    """Starts all loggers but TensorBoard; ``before``: rows in ``metrics.jsonl`` of earlier starts."""
    told = {
        "parent": os.getpid(),
        "title": f"{job.name}-{run.name}",
        "run": str(run.resolve()),
        "before": before,
        "wait_s": job.logger.wait_s,
    }
    for name, key in NAMED_AFTER_THE_RUN.items():
        asked = getattr(job.logger, name)
        if asked is not None:
            settings: dict[str, Any] = asked.model_dump(mode="json")
            settings[key] = settings[key] or job.name
            yield _started(run, {**told, "name": name, "settings": settings})
    for i, target in enumerate(job.logger.others):
        own = {"name": f"others.{i}", "key": f"logger.others.{i}", "allow": job.security.allow}
        yield _started(run, {**told, **own, "settings": target.model_dump(mode="json", by_alias=True)})


def _started(run: Path, begin: dict[str, Any]) -> LoggerProcess:
    (run / "loggers").mkdir(exist_ok=True)
    return LoggerProcess(run, begin)
