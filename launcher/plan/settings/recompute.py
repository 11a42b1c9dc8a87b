"""``parallel.recompute``: modules that run their forward again in the backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.parallel import Recompute
from launcher.plan.partition.stages import covers
from launcher.plan.values.facts import Skeleton
from launcher.plan.values.recomputed import Recomputed

KEY = "parallel.recompute"
MODULES = f"{KEY}.modules"


def resolve(asked: Recompute | None, skeleton: Skeleton) -> tuple[tuple[Recomputed, ...], list[Problem]]:
    """One entry a module that is asked for, in definition order; nothing inside of a module that runs again as a whole.

    Exact names beat globs, later keys earlier.
    """
    if asked is None:
        return (), []
    policies = _policies(asked)
    found = [p for key in policies for p in _nobody(key, skeleton)]
    if found:
        return (), found

    chosen: dict[str, str] = {}
    for module in skeleton.modules:
        key = _key(policies, module)
        inside = any(covers(around, module) for around in chosen)
        if key is not None and not inside and module not in skeleton.containers:
            chosen[module] = key
    each = [m for key in policies for m in [n for n, k in chosen.items() if k == key][:: asked.every]]

    def one(module: str) -> Recomputed:
        keep = asked.keep if policies[chosen[module]] == "selective" else ()
        return Recomputed(module, keep, asked.comm == "recompute")

    return tuple(one(m) for m in skeleton.modules if m in each), []


def _policies(asked: Recompute) -> dict[str, str]:
    """By name or glob."""
    if isinstance(asked.modules, Mapping):
        return dict(asked.modules)
    names = (asked.modules,) if isinstance(asked.modules, str) else asked.modules
    return dict.fromkeys(names, asked.policy)


def _key(policies: Mapping[str, str], module: str) -> str | None:
    if module in policies:
        return module
    return next((key for key in reversed(list(policies)) if fnmatchcase(module, key)), None)


def _nobody(key: str, skeleton: Skeleton) -> Iterator[Problem]:
    """A key that stands for no module, or for one whose forward nobody calls."""
    named = [m for m in skeleton.modules if fnmatchcase(m, key)]
    if not named:
        tops = list(dict.fromkeys(m.split(".")[0] for m in skeleton.modules))[:12]
        yield Problem(MODULES, f"{key}: no module is called so; there are {', '.join(tops)}")
    elif all(m in skeleton.containers for m in named):
        text = f"{key}: a list of modules, which is not called itself; name what is in it"
        yield Problem(MODULES, text, quote(f"{MODULES}={key}.*"))
