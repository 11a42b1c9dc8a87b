"""The cures of a refusal, pasted into the job that was refused."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from launcher.errors import Problem

STAGES = "parallel.pipeline.stage_config."
Job = dict[str, Any]


def pasted(job: Mapping[str, Any], problems: tuple[Problem, ...]) -> Job | None:
    """The job with every cure; ``None`` if a cure is missing or is not ``key=value``."""
    out = copy.deepcopy(dict(job))
    for problem in problems:
        words = [w.partition("=") for w in shlex.split(problem.cure)]
        if not words or not all(equals for _, equals, _ in words):
            return None
        for key, _, value in words:
            _set(out, key, yaml.safe_load(value))
    return out


def _set(job: Job, key: str, value: Any) -> None:
    """Below ``stage_config`` the rest of the key is the name of a module, including dots."""
    at: Any = job
    if key.startswith(STAGES):
        pipeline = at["parallel"]["pipeline"]
        if not isinstance(pipeline["stage_config"], dict):
            pipeline["stage_config"] = {}
        pipeline["stage_config"][key.removeprefix(STAGES)] = value
        return
    *around, last = key.split(".")
    for name in around:
        at = at.setdefault(name, {})
    at[last] = value
