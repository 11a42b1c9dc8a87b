"""Names and globs of modules in settings, read against a model."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from shlex import quote

from launcher.errors import Problem
from launcher.plan.values.facts import Skeleton


def nobody(setting: str, key: str, skeleton: Skeleton) -> Iterator[Problem]:
    """A ``key`` of ``setting`` that stands for no module, or for one whose forward nobody calls."""
    named = [m for m in skeleton.modules if fnmatchcase(m, key)]
    if not named:
        tops = list(dict.fromkeys(m.split(".")[0] for m in skeleton.modules))[:12]
        yield Problem(setting, f"{key}: no module is called so; there are {', '.join(tops)}")
    elif all(m in skeleton.lists for m in named):
        text = f"{key}: a list of modules, which is not called itself; name what is in it"
        yield Problem(setting, text, quote(f"{setting}={key}.*"))
