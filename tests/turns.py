"""What CI tries in turns: each run tries a quarter of the long tests, and every part that has changed in full.

    python -m tests.turns slurm      # exit code 0: this run tries the part

The quarter depends on the number of commits: four landings, one commit each, try everything. Forty landings try all odd
models. The tests of a part are those of ``tests/long.txt`` and of its own make targets. No turns apply in ``make test``
and ``make test-long``. A long test that belongs to no part is tried in every run.

A landing that changes a third of the parts gets only its quarter: all parts together take longer than CI has on a slow
machine, and a run that CI stops has no result. Its author runs ``make test-long``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
QUARTERS, FORTIETHS, THIRD = 4, 40, 1 / 3
LANDING = timedelta(hours=6)
"""Commits of one landing are at most this much older than the newest one."""
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """``tests``, and the ``sources`` that they also test: paths of files or folders from the root."""

    tests: tuple[str, ...]
    sources: tuple[str, ...]

    def has(self, files: frozenset[str]) -> bool:
        """Return true if one of ``files`` belongs to the part."""
        return any(f.startswith((*self.tests, *self.sources)) for f in files)


PARTS = {
    "calibration": Part(("tests/extras/calibration",), ("launcher/extras/calibration",)),
    "certificate's faults": Part(
        ("tests/steps/test_certify_says_no.py", "tests/steps/test_certify_new_faults.py"),
        ("launcher/steps/cert",),
    ),
    "checkpoints": Part(("tests/checkpoint",), ("launcher/checkpoint", "launcher/untrusted")),
    "command line": Part(
        ("tests/test_cli_", "tests/test_console.py", "tests/test_own_targets.py", "tests/job", "tests/mistakes"),
        ("launcher/job", "launcher/run", "launcher/__main__.py", "conf", "recipes"),
    ),
    "data": Part(("tests/data",), ("launcher/data",)),
    "device matrices": Part(
        ("tests/extras/device_matrix", "tests/steps/test_going_on_over_matrices.py"),
        ("launcher/extras/device_matrix",),
    ),
    "devices": Part(
        ("tests/fake_accelerator", "tests/gpu"),
        ("launcher/runtime", "launcher/parallel", "launcher/steps", "launcher/run"),
    ),
    "drills": Part(("tests/drills", "tests/extras/drill"), ("launcher/extras/drill",)),
    "encryption": Part(
        ("tests/run/test_encrypt.py", "tests/run/test_no_key_is_shown.py"),
        ("launcher/checkpoint/tensorfile/encryption.py",),
    ),
    "layout search": Part(("tests/extras/layout_search",), ("launcher/extras/layout_search", "launcher/plan/time")),
    "losses, models, optimizers": Part(
        ("tests/models", "tests/objective", "tests/optim"), ("launcher/models", "launcher/objective", "launcher/optim")
    ),
    "MindSpore's files": Part(("tests/extras/mindspore",), ("launcher/extras/mindspore",)),
    "odd models": Part(("tests/parity/zoo", "tests/parallel/test_unusual.py"), ("launcher/parallel/trace",)),
    "other extras": Part(
        (
            "tests/extras/test_",
            "tests/extras/images",
            "tests/extras/k8s",
            "tests/extras/report",
            "tests/extras/starter",
        ),
        ("launcher/extras", "launcher/errors.py"),
    ),
    "pages": Part(
        ("tests/test_benchmark", "tests/test_docs.py", "tests/test_readme.py"), ("README.md", "docs", "benchmarks")
    ),
    "parallel models": Part(
        ("tests/parallel", "tests/test_parity", "tests/test_evaluation.py", "tests/test_document_mask.py"),
        ("launcher/parallel", "launcher/plan/cut", "launcher/runtime/training", "launcher/models"),
    ),
    "plans": Part(
        ("tests/plan", "tests/test_golden_plans.py", "tests/test_imports.py"),
        ("launcher/plan", "launcher/parallel/cost", "conf", "recipes"),
    ),
    "preparing text": Part(("tests/data/prepare", "tests/data/chat"), ("launcher/data/prepare", "launcher/data/chat")),
    "products of layouts": Part(
        ("tests/test_compatibility.py", "tests/test_precision.py", "tests/test_ignored_targets.py"),
        ("launcher/plan/schedule", "launcher/parallel/fsdp", "launcher/runtime/training"),
    ),
    "runs": Part(
        ("tests/run", "tests/test_closed_streams.py", "tests/test_process_pool.py", "tests/test_untrusted_files.py"),
        ("launcher/run", "launcher/runtime", "launcher/steps"),
    ),
    "steps": Part(("tests/steps",), ("launcher/steps",)),
    "sweeps": Part(("tests/extras/sweep",), ("launcher/extras/sweep",)),
    "trackers": Part(("tests/extras/loggers",), ("launcher/extras/loggers",)),
    "wheel": Part(("tests/test_packaging.py",), ("pyproject.toml",)),
    "nodes": Part(("tests/nodes",), ("launcher/runtime/cluster", "launcher/run/external_ranks", "Makefile", ".ci")),
    "slurm": Part(("tests/slurm",), ("launcher/run/slurm", "launcher/runtime/cluster", "Makefile", ".ci")),
}
MAKE_TARGETS = ("nodes", "slurm")
"""Parts that are one target of the Makefile, and are tried as one."""


def quarter_of(path: str) -> int:
    """The quarter in which the test file ``path`` is tried."""
    return zlib.crc32(path.encode()) % QUARTERS


def whole(files: frozenset[str] | None) -> list[str]:
    """Return the names of the parts that are tried in full.

    ``files``: the files that the newest landing changed. No part is tried in full if they are unknown (``None``), or if
    they belong to a third of the parts.
    """
    names = [name for name, part in PARTS.items() if part.has(files or frozenset())]
    return names if len(names) < len(PARTS) * THIRD else []


def waits(path: str, quarter: int, tried: Collection[str]) -> bool:
    """Return true if the long tests of a file are left to a later run; ``tried``: parts that are tried in full."""
    parts = {name for name, part in PARTS.items() if path.startswith(part.tests)}
    return bool(parts) and quarter_of(path) != quarter and parts.isdisjoint(tried)


def quarter() -> int:
    """The quarter that is tried now."""
    return _landings() % QUARTERS


def due(models: Sequence[T]) -> Sequence[T]:
    """The odd models that are tried now: one in forty."""
    return models[_landings() % FORTIETHS :: FORTIETHS]


def _landings() -> int:
    """The number of commits, or ``TURN`` in the environment; without a history, a number that most landings change."""
    count = os.environ.get("TURN") or (_git("rev-list", "--count", "HEAD") if _history() else None)
    return int(count) if count else zlib.crc32((ROOT / "CHANGELOG.md").read_bytes())


def landed_files() -> frozenset[str] | None:
    """Return the files that the newest landing changed, or ``None`` without git or in a shallow clone."""
    newest = _git("log", "-1", "--format=%cI")
    if newest is None or not _history():
        return None
    base = os.environ.get("CI_BASE")
    since = (f"{base}..HEAD",) if base else (f"--since={datetime.fromisoformat(newest) - LANDING}",)
    named = _git("log", "--format=", "--name-only", *since)
    return None if named is None else frozenset(named.split())


def _history() -> bool:
    return _git("rev-parse", "--is-shallow-repository") == "false"


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def header() -> str:
    """One line for the log of CI."""
    return (
        f"quarter {quarter()} of {QUARTERS}; whole, for they have changed: {', '.join(whole(landed_files())) or 'none'}"
    )


if __name__ == "__main__":
    [target] = sys.argv[1:]
    now = target in whole(landed_files()) or quarter_of(PARTS[target].tests[0]) == quarter()
    print(f"{target}: {'tried in this run' if now else 'left to a later quarter'}; {header()}")
    sys.exit(not now)
