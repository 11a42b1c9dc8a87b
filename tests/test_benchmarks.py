"""Every benchmark that needs no other program still runs, and prints the table that it documents."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# each benchmark at its smallest size: the patterns of its lines in order, and the number of lines of each
SMALLEST: dict[str, tuple[str, list[tuple[str, int]]]] = {
    "overhead": (
        "benchmarks/overhead.py --blocks 1 --steps 1",
        [("launcher +[0-9.]+ ms a step", 1), ("by hand +[0-9.]+ ms a step", 1), ("ratio +[0-9.]+", 1)],
    ),
    "memory": (
        "benchmarks/memory.py --only '1f1b unsharded full'",
        [
            ("pipeline +level +recompute +rank", 1),
            (r"1f1b +unsharded +full +\d( +[0-9.]+){7} +-?[0-9.]+%$", 4),
            ("largest difference [0-9.]+%", 1),
            ("python", 1),
        ],
    ),
    "recompute": (
        "benchmarks/recompute.py --blocks 1 --steps 1 model.dim=32 model.heads=2",
        [
            ("recompute +ms a step", 1),
            (r"(none|selective|half|full) +[0-9.]+( +[0-9.]+){3}$", 4),
            ("python", 1),
        ],
    ),
    "schedules": (
        "benchmarks/schedules.py --times 1 --unit 0.001 --ranks 2 --tolerance inf",
        [
            ("schedule +stages", 1),
            (r".{20} +\d+ +\d+( +[0-9.]+){4} +[0-9.]+% +[0-9.]+$", 12),
            ("overhead [0-9.]+ ms an action", 1),
            ("held: ", 1),
        ],
    ),
    "startup": (
        "benchmarks/startup.py --times 1",
        [
            ("import torch +[0-9.]+ s", 1),
            ("--help +[0-9.]+ s", 1),
            ("invalid request +[0-9.]+ s", 1),
            ("show=plan +[0-9.]+ s", 1),
            ("first step, 4 ranks +[0-9.]+ s", 1),
        ],
    ),
    "planning": (
        "benchmarks/planning.py --times 1",
        [
            ("show=plan +CPU s +min +max +of torch", 1),
            (r"(import torch|512 ranks|16384 ranks|recompute=auto)( +[0-9.]+){4}$", 4),
            ("goal 10 s on 16384 ranks: (met|MISSED)", 1),
            ("python", 1),
        ],
    ),
    "fusion": (
        "benchmarks/fusion.py --blocks 1 --steps 1",
        [
            ("comm_fusion +all-gather", 1),
            (r"(off|auto|size .* MB|index) +(\d+: [0-9.]+ MB +){3}", 5),
            ("of rank 0, as planned", 1),
            ("network: {latency_us: ", 1),
            ("python", 1),
        ],
    ),
    "compile": (
        "benchmarks/compile.py --blocks 1 --steps 1 model.layers=2",
        [
            (" +ms a step", 1),
            ("eager( +[0-9.]+){4}$", 1),
            ("compiled( +[0-9.]+){5}$", 1),
            ("ratio [0-9.]+; 1 blocks of 1 steps", 1),
            ("python", 1),
        ],
    ),
    "save": (
        "benchmarks/save.py --blocks 1 --steps 1",
        [
            ("one step [0-9.]+ ms", 1),
            (" +stall ms", 1),
            ("(no checkpoint|waited for|by a thread)( +[0-9.]+){5}$", 3),
            ("1 blocks of 1 steps", 1),
        ],
    ),
    "prepare": (
        "benchmarks/prepare.py --mb 1",
        [
            ("(tokenizers alone|prepare) +[0-9.]+ MB a CPU second", 2),
            (r"ratio +[0-9.]+, over \d+ MB, the same tokens", 1),
            (r"out: \d+ tokens \(ids below \d+\) of \d+ documents, each ended by ", 1),
            (r"\d+ MB in [0-9.]+ s on \d+ cores: [0-9.]+ MB/s", 1),
            ("all processes together: at most ", 1),
        ],
    ),
    "rank_memory": (
        "-m benchmarks.rank_memory --times 1",
        [
            ("all processes +[0-9]+ MB", 1),
            ("8 ranks +[0-9]+ MB", 1),
            ("private to a rank +[0-9]+ MB", 1),
        ],
    ),
    "transform": (
        "-m benchmarks.transform --mib 64 --blocks 1 --cases tp --without-mindspore",
        [
            ("# Changes of layout", 1),
            (r"(?![|#]).*", 8),
            ("## TP8 -> TP4", 1),
            ("", 1),
            (r"\| call \|", 1),
            (r"\|---", 1),
            (r"\| .* \| [0-9.]+ \| [0-9.]+ - [0-9.]+ \| [0-9.]+ \| \d+ \| [^*]*\|$", 7),
            ("", 1),
            ("1000 parameters from 4096 ranks to 512 are planned", 1),
        ],
    ),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs_and_its_table_has_the_documented_rows(name: str) -> None:
    command, expected = SMALLEST[name]
    run = subprocess.run(
        [sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr

    patterns = [pattern for pattern, times in expected for _ in range(times)]
    lines = run.stdout.splitlines()
    wrong = [(line, pattern) for line, pattern in zip(lines, patterns, strict=False) if not re.match(pattern, line)]
    assert (wrong, len(lines)) == ([], len(patterns)), run.stdout
