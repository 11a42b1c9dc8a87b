"""Queries Slurm through its commands."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from difflib import get_close_matches

from launcher.errors import Problem, RunError
from launcher.job.schema.job import Slurm

KEY = "launch.slurm"
PATIENCE_S = 60.0


def ask(words: Sequence[str]) -> str:
    """The output of a Slurm command. Raises ``RunError`` with the command's own message."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise RunError(f"{words[0]}: no answer in {PATIENCE_S:g} s") from None
    except FileNotFoundError:
        raise RunError(f"{words[0]}: there is no such command on this machine") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RunError(f"{words[0]}: {said[-1] if said else f'it ended with {done.returncode}'}")
    return done.stdout


def problems(slurm: Slurm) -> list[Problem]:
    """Problems of settings that this cluster does not support."""
    if shutil.which("sbatch") is None:
        if not slurm.submit:
            return []
        text = "true: there is no sbatch on this machine; false writes the batch file and submits nothing"
        return [Problem(f"{KEY}.submit", text, f"{KEY}.submit=false")]
    try:
        return _unknown_partition(slurm)
    except RunError as error:
        text = f"{error}; submit=false writes the batch file and submits nothing"
        return [Problem(f"{KEY}.submit", f"true: {text}", f"{KEY}.submit=false")] if slurm.submit else []


def jobs() -> frozenset[str]:
    """Numbers of this user's pending and running jobs, array tasks separately. Raises ``RunError``."""
    return frozenset(ask(["squeue", "--noheader", "--array", "--me", "--format=%i"]).split())


def longest_array() -> int | None:
    """The largest number of tasks in an array, if the cluster reports it."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask(["scontrol", "show", "config"]), re.MULTILINE)
    return None if found is None else int(found[1])


def _unknown_partition(slurm: Slurm) -> list[Problem]:
    there = ask(["sinfo", "--noheader", "--format=%R"]).split()
    if slurm.partition is None or slurm.partition in there:
        return []
    near = get_close_matches(slurm.partition, there, 1)
    text = f"{slurm.partition}: this cluster has no such partition; there are {', '.join(sorted({*there}))}"
    return [Problem(f"{KEY}.partition", text, f"{KEY}.partition={near[0]}" if near else "")]
