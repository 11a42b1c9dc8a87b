"""Times an answer, a plan and a first step, and compares each with the import of torch alone.

python benchmarks/startup.py [--times 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

LAUNCHER = (sys.executable, "-m", "launcher")


def seconds(command: tuple[str, ...]) -> float:
    """Return the wall time of a command."""
    began = time.perf_counter()
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def first_step() -> float:
    """Return the seconds from the command to the line of the first optimizer step on 4 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = (*LAUNCHER, "train.steps=1", "steps=[train]", "logger.progress=plain", f"runs={folder}")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
            assert run.stdout is not None
            for line in run.stdout:
                if line.startswith("step 1/"):
                    took = time.perf_counter() - began
            if run.wait():
                raise SystemExit("the run failed")
    return took


CASES: dict[str, Callable[[], float]] = {
    "import torch": lambda: seconds((sys.executable, "-c", "import torch")),
    "--help": lambda: seconds((*LAUNCHER, "--help")),
    "invalid request": lambda: seconds((*LAUNCHER, "train.stepz=3", "parallel.pipeline.scheduler=1f2b")),
    "show=plan": lambda: seconds((*LAUNCHER, "show=plan")),
    "first step, 4 ranks": first_step,
}
GOALS = {
    "--help": (0.0, 0.3),
    "invalid request": (0.0, 0.5),
    "show=plan": (1.0, 1.5),
    "first step, 4 ranks": (1.0, 3.0),
}
"""The most seconds: a multiple of the time that importing torch takes, and a number to add."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    found: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(times):
        for name, measure in CASES.items():
            found[name].append(measure())

    # goals are relative to the time that importing torch takes here
    base = statistics.median(found["import torch"])
    for name, took in found.items():
        middle = statistics.median(took)
        line = f"{name:<20} {middle:6.2f} s  (min {min(took):.2f}, max {max(took):.2f})"
        if name in GOALS:
            share, extra = GOALS[name]
            what = f"{'torch + ' if share else ''}{extra:.1f} s"
            line += f"  goal {what}: {'met' if middle <= share * base + extra else 'MISSED'}"
        print(line)


if __name__ == "__main__":
    main()
