"""Checks the classes of the user's loggers without constructing any."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from launcher.errors import Problem, RequestError
from launcher.job.schema.job import Job
from launcher.job.targets import check, locate

CALLS = {"on_start": ("config", "plan", "folder"), "log": ("row",), "close": ()}
"""The methods of a logger and their arguments; all but ``log`` may be missing."""


def problems(job: Job) -> list[Problem]:
    """Problems of the loggers: missing classes, no ``log``, methods or arguments that do not fit."""
    found: list[Problem] = []
    for i, target in enumerate(job.logger.others):
        key = f"logger.others.{i}._target_"
        try:
            cls = locate(target.target, job.security.allow, object, key=key)
            found += _methods(cls, target.target, key)
            check(target, job.security.allow, object, key=key)
        except RequestError as error:
            found += error.problems
    return found


def _methods(cls: type, name: str, key: str) -> Iterator[Problem]:
    if not callable(getattr(cls, "log", None)):
        called = ", ".join(f"{method}({', '.join(given)})" for method, given in CALLS.items())
        yield Problem(key, f"{name}: has no method log; a logger has {called}, of which log has to be there")
    for method, given in CALLS.items():
        act = getattr(cls, method, None)
        if not inspect.isfunction(act):
            continue
        try:
            inspect.signature(act).bind(None, *given)
        except TypeError as error:
            yield Problem(key, f"{name}: {method}({', '.join(given)}) is called, and does not fit: {error}")
