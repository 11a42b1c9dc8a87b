"""The tests that belong to the changed files: ``python -m tests.changed HEAD`` prints them.

``tests/`` mirrors ``launcher/``: a module has the test file of its name, or else the folder that mirrors its own. A
helper of the tests has no test file: after a change to one, run ``make test``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = ("tests/test_imports.py", "tests/test_surface.py")
"""Tests that read all sources."""
OF_FOLDERS = {
    "conf": ("tests/test_golden_plans.py", "tests/job/test_conf.py"),
    "recipes": ("tests/test_golden_plans.py", "tests/run/test_recipes.py"),
    "launcher/plan": ("tests/test_golden_plans.py",),
    "launcher/planner": ("tests/test_golden_plans.py",),
    "docs": ("tests/test_docs.py", "tests/test_readme.py"),
    "README.md": ("tests/test_readme.py",),
    "CONTRIBUTING.md": ("tests/test_docs.py",),
    "pyproject.toml": ("tests/test_packaging.py",),
}
"""Tests of paths without a mirror, or in addition to those in the mirror."""


def paths_of(changed: Iterable[str]) -> list[str]:
    """Return files and folders for pytest; ``changed`` are paths from the root, also of deleted files."""
    every = {*ALWAYS}
    for path in changed:
        every |= {t for folder, tests in OF_FOLDERS.items() if f"{path}/".startswith(f"{folder}/") for t in tests}
        every |= {*_mirrored(Path(path))}
    return sorted(t for t in every if (ROOT / t).exists())


def _mirrored(path: Path) -> Iterator[str]:
    if path.parts[0] == "tests":
        if path.name.startswith("test_"):
            yield str(path)
        return
    if path.parts[0] != "launcher" or path.suffix != ".py":
        return
    folder = Path("tests", *path.parent.parts[1:])
    named = [p.relative_to(ROOT) for p in (ROOT / folder).glob(f"test_{path.stem}*.py")]
    if named:
        yield from map(str, named)
        return

    # the folder that mirrors the module's own, or the nearest one above it
    while not any((ROOT / folder).glob("test_*.py")) and folder != Path("tests"):
        folder = folder.parent
    if folder != Path("tests"):
        yield str(folder)


def changed_since(commit: str) -> list[str]:
    """Return the paths that differ from ``commit``, including new files that git does not ignore."""
    differ = ("diff", "--name-only", commit)
    new = ("ls-files", "--others", "--exclude-standard")
    return [line for words in (differ, new) for line in _git(*words)]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    print(*paths_of(changed_since(sys.argv[1])), sep="\n")
