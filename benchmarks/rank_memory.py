"""Measures the memory of a command and its 8 ranks after the first step of a tiny model.

All processes are halted meanwhile. Memory that several processes share counts once, as long as no other
process on the machine has torch loaded. Run it on an idle machine, in the folder above this one:

    python -m benchmarks.rank_memory [--times 3]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile

from benchmarks.processes import children, resident, tree

RANKS = 8
REQUEST = (
    "train.steps=100000", "steps=[train]", "logger.progress=plain", f"launch.nproc={RANKS}", "model=lm_tiny",
    "model.dim=16", "data=random_tokens", "data.vocab_size=64", "data.seq_len=8", "train.batch_size=16",
    "parallel.hsdp.threshold=0",
)  # fmt: skip
"""Its weights and activations take less than 1 MB, so the rest is what any run takes."""


def measured() -> tuple[float, float, float]:
    """Return MB: of all processes, of the ranks, and of the ranks' pages that only one process has."""
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-m", "launcher", *REQUEST, f"runs={folder}")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
            assert run.stdout is not None
            if not any(line.startswith("step 1/") for line in run.stdout):
                raise SystemExit("the run failed")
            pids = tree(run.pid)
            try:
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                ranks = max(map(children, pids), key=len)
                private = resident(ranks, "Private_Clean", "Private_Dirty")
                return resident(pids, "Pss") / 1e6, resident(ranks, "Pss") / 1e6, private / 1e6
            finally:
                for pid in reversed(pids):
                    os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=3)
    times = parser.parse_args().times
    rows = zip(*(measured() for _ in range(times)), strict=True)
    for name, found in zip(("all processes", f"{RANKS} ranks", "private to a rank"), rows, strict=True):
        print(f"{name:<20} {statistics.median(found):5.0f} MB  (min {min(found):.0f}, max {max(found):.0f})")


if __name__ == "__main__":
    main()
