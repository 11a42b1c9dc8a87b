"""Processes as srun starts them, which differ only in their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).parents[2]


@contextmanager
def tasks(
    n: int,
    *words: str,
    only: Sequence[int] | None = None,
    cwd: Mapping[int, Path] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start ``launcher WORDS`` in ``n`` processes.

    ``only``: start only these ranks. ``cwd``: the current folder of ranks that have another one.
    """
    step = {
        "SLURM_STEP_NUM_TASKS": str(n), "SLURM_NTASKS": str(n), "SLURM_STEP_TASKS_PER_NODE": str(n),
        "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
        "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "launcher", *words],
            cwd=(cwd or {}).get(rank, ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | step | (env or {}) | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in (range(n) if only is None else only)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for task in started:
            task.kill()
            task.wait()
            assert task.stdout is not None
            task.stdout.close()
