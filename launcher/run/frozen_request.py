"""Writes ``request.yaml``, the request that a job of a cluster runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from launcher.checkpoint.tensorfile.disk import write_text
from launcher.errors import Problem
from launcher.job.schema import redact
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan

GROUPS = ("model", "data", "loss", "optim", "schedule", "steps")
"""Sections with one of several options: all of their keys are written."""
ASIDE = {"recipe", "show", "run_dir", "search", "sweep"}


def recipe_text(job: Job, comments: tuple[str, ...]) -> str:
    """Returns a recipe with all settings that are not defaults; ``comments``: lines at its start."""
    settings = job.model_dump(mode="json", by_alias=True)
    changed = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    data: dict[str, Any] = {"defaults": [{f"override /{group}": None} for group in GROUPS]}
    for section, value in settings.items():
        if section in ASIDE:
            continue
        if section in GROUPS:
            data[section] = value
        elif section in changed:
            data[section] = changed[section]
    lines = [f"# {line}" for line in comments]
    return "\n".join([*lines, yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)])


NAME = "request.yaml"
"""The file in the run folder."""


def words(run: Path) -> tuple[str, str]:
    """Returns the overrides that start the run in the folder ``run``, quoted for the override grammar."""
    from launcher.job.overrides import quoted  # imports Hydra, which the status of a run does not need

    return f"recipe={quoted(str(run / NAME))}", f"run_dir={quoted(str(run))}"


def write(job: Job, plan: Plan, run: Path) -> int:
    """Writes the request into the run folder. Returns the number of ranks per node."""
    each = plan.sizes.grid.size // job.launch.nnodes
    write_text(run / NAME, request_text(job, each))
    return each


def request_text(job: Job, each: int) -> str:
    """Returns the request for the ranks; the cluster starts ``each`` of them on a node."""
    settings = {"slurm": None, "k8s": None, "mode": "external", "nproc": each, "max_restarts": 0}
    if job.launch.k8s is not None:  # the job sets the port, and restarts are the cluster's task
        settings["port"] = None
    launch = job.launch.model_copy(update=settings)
    return recipe_text(job.model_copy(update={"launch": launch}), ("The request of this run.",))


def problems(job: Job, key: str, cluster: str, outer: int | None) -> list[Problem]:
    """Returns problems on any cluster.

    ``key``: the setting that requests it; ``outer``: ranks that are running.
    """
    if outer is not None:
        text = "this process is already a rank of torchrun or srun, and every rank would submit a job"
        return [Problem(key, text, "launch=auto")]
    problems = []
    if job.launch.mode in ("spawn", "inproc"):
        text = f"{job.launch.mode}: in a job of {cluster} the ranks are started by {_starter(cluster)}"
        problems.append(Problem("launch.mode", text, "launch.mode=auto"))
    values = job.model_dump(
        mode="json", by_alias=True, exclude={"checkpoint"}
    )  # its encrypt accepts only the place of a key
    for secret in _hidden(values, redact.values(values)):
        text = "is a secret, and the request is written into the run folder"
        problems.append(Problem(secret, f"{text}; {_instead(secret)}"))
    return problems


def _hidden(values: Any, redacted: Any, at: str = "") -> Iterator[str]:
    """Yields the keys of values that differ in ``redacted``."""
    if isinstance(values, Mapping | list):
        keys = values if isinstance(values, Mapping) else range(len(values))
        for key in keys:
            yield from _hidden(values[key], redacted[key], f"{at}.{key}" if at else str(key))
    elif values != redacted:
        yield at


def _instead(key: str) -> str:
    if key.startswith("launch.k8s.env."):
        return "launch.k8s.env_from names a Secret that contains it"
    return "give it as env:NAME or file:PATH"


def _starter(cluster: str) -> str:
    return "srun" if cluster == "Slurm" else "its pods"
