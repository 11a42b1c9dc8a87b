"""Runs the named drills, or all; fails if any outcome was wrong."""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import tempfile
import time
from pathlib import Path

import tests.conftest  # noqa: F401  the folder for temporary files, before torch is imported

ALL = ("hang", "preempt", "agents", "sweep", "disk_full", "environment", "corrupt", "changes", "keys")
RIGHT, OVER = "right", "over"  # over: the run ended before it was disturbed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument("names", nargs="*", default=ALL, metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--times", type=int, help="tries of each drill, if not its own number")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    wrong = 0
    for name in asked.names:
        drill = importlib.import_module(f"tests.drills.{name}")
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            tally = drill.run(asked.times or drill.TIMES, random.Random(asked.seed), Path(folder))
        counts = ", ".join(f"{outcome} {n}" for outcome, n in sorted(tally.items()))
        print(f"{name}: {drill.__doc__.splitlines()[0]}\n  {counts} ({time.monotonic() - began:.0f} s)", flush=True)
        wrong += tally.total() - tally[RIGHT] - tally[OVER]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
