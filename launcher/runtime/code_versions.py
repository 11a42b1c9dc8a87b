"""Which code a run uses: versions of packages, a commit, digests of the user's modules."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launcher.checkpoint.tensorfile.disk import parsed, read_bytes
from launcher.untrusted.files import LONGEST_TEXT

NAME = "versions.json"
PACKAGES = {"launcher": "autoparallel-launcher", "torch": "torch"}
UNINSTALLED = "not installed: run from a checkout"
PATIENCE_S = 20.0  # the limit for git in a folder that many machines share
STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=all")
FILTERS = ("config", "-z", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process|required)$")
OFF = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null", "protocol.allow": "never"}
"""Disables programs that a repository may have git run, as it may be untrusted."""
SHORT = 10
"""Digits of a commit or a digest that are shown."""


@dataclass(frozen=True)
class CodeVersions:
    """``commit``: ``None`` if ``folder`` is in no git repository; ``dirty``: tracked files have changes.

    ``modules``: the SHA-256 of each module file that contains a ``_target_``.
    """

    launcher: str
    python: str
    torch: str
    folder: str
    commit: str | None = None
    dirty: bool | None = None
    modules: dict[str, str] = field(default_factory=dict)


def code_versions(folder: Path, targets: Iterable[str]) -> CodeVersions:
    """The versions of this process, which has imported the dotted paths ``targets``."""
    commit, dirty = _commit(folder)
    return CodeVersions(
        python=platform.python_version(),
        folder=str(folder),
        commit=commit,
        dirty=dirty,
        modules=dict(sorted(_modules(targets))),
        **{name: package_version(package) for name, package in PACKAGES.items()},
    )


def package_version(package: str) -> str:
    """The installed version of ``package``, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return UNINSTALLED


@cache
def of_a_rank() -> dict[str, str]:
    """What must be the same on all ranks of a run, by names for the user."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return {
        "launcher": package_version(PACKAGES["launcher"]),
        "torch": package_version(PACKAGES["torch"]),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "launcher's source": digest.hexdigest()[:SHORT],
    }


def _commit(folder: Path) -> tuple[str | None, bool | None]:
    """The commit of ``folder`` and whether it has changes; ``None`` without git, which is optional."""
    filters = _git(folder, FILTERS, OFF)
    if filters is None or filters.returncode not in (0, 1):  # 1: it has none
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


def _modules(targets: Iterable[str]) -> Iterator[tuple[str, str]]:
    for target in targets:
        parts = target.split(".")
        names = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
        name = next((name for name in names if name in sys.modules), None)
        file = getattr(sys.modules.get(name or ""), "__file__", None)
        if name is not None and file is not None and Path(file).is_file():
            yield name, hashlib.sha256(Path(file).read_bytes()).hexdigest()


def changes(before: CodeVersions, now: CodeVersions) -> str:
    """Lists the differences, each as before -> now; "" if there are none.

    Only modules that both starts have imported are compared.
    """
    pairs = [(name, getattr(before, name), getattr(now, name)) for name in ("launcher", "python", "torch")]
    pairs.append(("commit", _shown(before), _shown(now)))
    both = before.modules.keys() & now.modules.keys()
    pairs += [(name, before.modules[name][:SHORT], now.modules[name][:SHORT]) for name in sorted(both)]
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


def _shown(at: CodeVersions) -> str:
    if at.commit is None:
        return "none"
    return at.commit[:SHORT] + (" with changes" if at.dirty else "")


def read(run: Path) -> tuple[CodeVersions, ...]:
    """The versions that the starts of ``run`` recorded, in their order.

    Unreadable records count as none: they are for information, and nothing depends on them.
    """
    path = run / NAME
    try:
        return tuple(map(_entry, parsed(path, read_bytes(path, LONGEST_TEXT))))
    except (OSError, ValueError, TypeError):
        return ()


def _entry(fields: dict[str, Any]) -> CodeVersions:
    versions = CodeVersions(**fields)
    texts = [versions.launcher, versions.python, versions.torch, versions.folder, versions.commit or ""]
    texts += [text for pair in dict(versions.modules).items() for text in pair]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("versions are texts")
    return versions


def as_json(each: Sequence[CodeVersions]) -> str:
    return json.dumps([asdict(one) for one in each], indent=1) + "\n"
