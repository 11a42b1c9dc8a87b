"""Checks the classes of the user's callbacks without constructing any."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem, RequestError
from launcher.job.schema.job import Job
from launcher.job.schema.similar_names import did_you_mean, nearest
from launcher.job.targets import check, locate

HOOKS = ("on_start", "on_step", "on_eval", "on_save", "on_end")


def problems(job: Job) -> list[Problem]:
    """Problems of the callbacks: missing classes, unknown hooks, no hook at all, unsuitable arguments."""
    found: list[Problem] = []
    for i, target in enumerate(job.callbacks):
        key = f"callbacks.{i}._target_"
        try:
            cls = locate(target.target, job.security.allow, object, key=key)
            found += _hooks(cls, target.target, key)
            check(target, job.security.allow, object, key=key)
        except RequestError as error:
            found += error.problems
    return found


def _hooks(cls: type, name: str, key: str) -> Iterator[Problem]:
    there = [n for n in dir(cls) if n.startswith("on_") and callable(getattr(cls, n))]
    known = ", ".join(HOOKS)
    if not there:
        yield Problem(key, f"{name}: has no hook; there are {known}")
    for hook in there:
        if hook not in HOOKS:
            right = nearest(hook, HOOKS)
            yield Problem(
                key,
                (
                    f"{name}: the launcher does not call its "
                    f"{hook}{did_you_mean(right) or f'; there are {known}'}"
                ),
            )
