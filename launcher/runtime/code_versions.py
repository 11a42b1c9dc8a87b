"""Records which code a run uses: versions of packages, a commit, digests of the user's modules."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launcher.checkpoint.tensorfile.disk import parsed, read_bytes
from launcher.runtime import git
from launcher.runtime.git import SHORT
from launcher.untrusted.files import LONGEST_TEXT

NAME = "versions.json"
PACKAGES = {"launcher": "autoparallel-launcher", "torch": "torch"}
UNINSTALLED = "not installed: run from a checkout"


@dataclass(frozen=True)
class CodeVersions:
    """The versions of the code that a run uses.

    ``commit``: ``None`` if it is unknown, as without a git repository; ``dirty``: tracked files have changes.
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
    """Returns the versions of this process, which has imported the dotted paths ``targets``."""
    commit, dirty = git.commit(folder)
    return CodeVersions(
        python=platform.python_version(),
        folder=str(folder),
        commit=commit,
        dirty=dirty,
        modules=dict(sorted(_modules(targets))),
        **{name: package_version(package) for name, package in PACKAGES.items()},
    )


def package_version(package: str) -> str:
    """Returns the installed version of ``package``, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return UNINSTALLED


@cache
def of_a_rank() -> dict[str, str]:
    """Returns the versions that must be the same on all ranks of a run, by the names that messages show."""
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
    then, since = (git.shown(at.commit, at.dirty) or "none" for at in (before, now))
    pairs.append(("commit", then, since))
    both = before.modules.keys() & now.modules.keys()
    pairs += [(name, before.modules[name][:SHORT], now.modules[name][:SHORT]) for name in sorted(both)]
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


def read(run: Path) -> tuple[CodeVersions, ...]:
    """Returns the versions that the starts of ``run`` recorded, in their order.

    Returns nothing for unreadable records: they only inform the user.
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
