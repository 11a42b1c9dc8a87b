"""Measures the CPU seconds of planning Llama 3 405B on 16,384 ranks, and of importing torch alone.

python benchmarks/planning.py [--times 3]
"""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import subprocess
import sys

GOAL = 10.0
"""The CPU seconds that a plan on 16,384 ranks may take."""

LLAMA = (
    "model.dim=16384", "model.layers=126", "model.heads=128", "model.kv_heads=8", "model.ffn_dim=53248",
    "parallel.grid.tp=8", "launch.nproc=8", "data.samples=20480",
)  # fmt: skip
INTERLEAVED = (
    "parallel.pipeline={stages: 16, chunks: 7, interleave: true, micro_batch_num: 16}",
    "parallel.recompute=null",
)
AUTO = ("parallel.pipeline={stages: 16, micro_batch_num: 16}", "parallel.hsdp.shard_size=-1")
MANY = ("launch.nnodes=2048", "train.batch_size=2048")
FEW = ("launch.nnodes=64", "train.batch_size=64")
CASES = {
    "import torch": ("-c", "import torch"),
    "512 ranks": ("-m", "launcher", "show=plan", "recipe=lm_8b_h100x64", *LLAMA, *INTERLEAVED, *FEW),
    "16384 ranks": ("-m", "launcher", "show=plan", "recipe=lm_8b_h100x64", *LLAMA, *INTERLEAVED, *MANY),
    "recompute=auto": ("-m", "launcher", "show=plan", "recipe=lm_8b_h100x64", *LLAMA, *AUTO, *MANY),
}


def seconds(command: tuple[str, ...]) -> float:
    """Return the CPU seconds of a command, in user and kernel mode; other load changes it little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode:
        raise SystemExit(run.stderr)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=3)
    times = parser.parse_args().times
    found: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(times):
        for name, command in CASES.items():
            found[name].append(seconds(command))

    print(f"{'show=plan':<16}{'CPU s':>8}{'min':>8}{'max':>8}{'of torch':>10}")
    torch = statistics.median(found["import torch"])
    for name, took in found.items():
        middle = statistics.median(took)
        print(f"{name:<16}{middle:8.2f}{min(took):8.2f}{max(took):8.2f}{middle / torch:10.1f}")
    worst = statistics.median(found["16384 ranks"])
    print(f"goal {GOAL:.0f} s on 16384 ranks: {'met' if worst <= GOAL else 'MISSED'}")
    print(f"python {platform.python_version()}; {times} times in turn")


if __name__ == "__main__":
    main()
