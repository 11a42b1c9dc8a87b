"""Asks git for the commit of a folder, and runs no program of the repository, which may be untrusted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

PATIENCE_S = 20.0  # the limit for git in a folder that many machines share
STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=all")
FILTERS = ("config", "-z", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process|required)$")
OFF = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null", "protocol.allow": "never"}
"""Disables programs that a repository may have git run, as it may be untrusted."""
SHORT = 10
"""Digits of a commit or a digest that are shown."""


def commit(folder: Path) -> tuple[str | None, bool | None]:
    """Returns the commit of ``folder`` and whether it has changes.

    Returns ``None`` for both if git reports no commit.
    """
    filters = _git(folder, FILTERS, OFF)
    if filters is None or filters.returncode not in (0, 1):  # 1: no filter is set
        return None, None
    off = {name: "false" if name.endswith(".required") else "" for name in filters.stdout.split("\0") if name}
    done = _git(folder, STATUS, {**OFF, **off})
    lines = [] if done is None or done.returncode else done.stdout.splitlines()
    oid = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    if oid is None or oid == "(initial)":
        return None, None
    return oid, any(not line.startswith("#") for line in lines)


def _git(
    folder: Path, words: Sequence[str], settings: Mapping[str, str]
) -> subprocess.CompletedProcess[str] | None:
    """Runs git; ``settings`` override those of the repository. Returns ``None`` if git does not work."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_CONFIG_")}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
    env["GIT_CONFIG_COUNT"] = str(len(settings))  # not by -c, which would split some names of filters
    for n, (name, value) in enumerate(settings.items()):
        env |= {f"GIT_CONFIG_KEY_{n}": name, f"GIT_CONFIG_VALUE_{n}": value}
    try:
        return subprocess.run(
            ("git", *words),
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=PATIENCE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def shown(commit: str | None, dirty: bool | None) -> str:
    """Returns a commit for people; "" if there is none.

    >>> shown("d670460b4b4aece5915caf5c68d12f560a9fe3e4", True)
    'd670460b4b with changes'
    """
    if commit is None:
        return ""
    return commit[:SHORT] + (" with changes" if dirty else "")
