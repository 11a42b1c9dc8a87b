"""Submits jobs to Slurm, and queries it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import Any

from launcher.checkpoint.tensorfile.disk import write_text
from launcher.console import say
from launcher.errors import Problem, RunError
from launcher.job.schema.job import Job
from launcher.job.schema.launch import Slurm
from launcher.plan.plan import Plan
from launcher.plan.values.note import Note
from launcher.run import frozen_request, slurm_files
from launcher.run.slurm_files import RankLayout, RunPaths

KEY = "launch.slurm"
PATIENCE_S = 60.0


def ask(words: Sequence[str]) -> str:
    """Returns the output of a Slurm command. Raises ``RunError`` with the command's own message."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise RunError(f"{words[0]}: no answer in {PATIENCE_S:g} s; try again when Slurm answers") from None
    except FileNotFoundError:
        text = "there is no such command on this machine; use a login node of the cluster"
        raise RunError(f"{words[0]}: {text}") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RunError(f"{words[0]}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def cluster_problems(slurm: Slurm) -> list[Problem]:
    """Returns problems of settings that this cluster does not support."""
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
    """Returns the largest number of tasks in an array, if the cluster reports it."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask(["scontrol", "show", "config"]), re.MULTILINE)
    return None if match is None else int(match[1])


def _unknown_partition(slurm: Slurm) -> list[Problem]:
    there = ask(["sinfo", "--noheader", "--format=%R"]).split()
    if slurm.partition is None or slurm.partition in there:
        return []
    near = get_close_matches(slurm.partition, there, 1)
    text = f"{slurm.partition}: this cluster has no such partition; partitions: {', '.join(sorted({*there}))}"
    return [Problem(f"{KEY}.partition", text, f"{KEY}.partition={near[0]}" if near else "")]


SIGNAL_KEY = "launch.slurm.signal_s"
USUAL = 300
"""The default in seconds, if nothing has been measured."""
LEAST, TIMES = 30, 2
"""The minimum in seconds, and the factor on the measured step and save: later ones may take longer."""


def with_signal_s(slurm: Slurm, runs: Sequence[Path]) -> tuple[Slurm, Note | None]:
    """Sets ``signal_s`` from the times of steps and saves in ``runs``, if there are any."""
    if slurm.signal_s is not None:
        return slurm, None
    timings = [took for run in runs if (took := _measured(run)) is not None]
    if not timings:
        return slurm.model_copy(update={"signal_s": USUAL}), None
    step, save = (max(times) for times in zip(*timings, strict=True))
    seconds = max(LEAST, ceil(TIMES * (step + save)))
    text = f"null -> {seconds}: for a step that took {step:.1f} s and a save that took {save:.1f} s"
    return slurm.model_copy(update={"signal_s": seconds}), Note(SIGNAL_KEY, text)


def _measured(run: Path) -> tuple[float, float] | None:
    """Returns the seconds of the longest step after the first, and of the longest save.

    Returns ``None`` if one is unknown.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as lines:
        rows = [*_complete_rows(lines)]
    steps = [row["step_ms"] for row in rows[1:] if isinstance(row.get("step_ms"), int | float)]
    saves = [row["save_stall_ms"] for row in rows if isinstance(row.get("save_stall_ms"), int | float)]
    return (max(steps) / 1e3, max(saves) / 1e3) if steps and saves else None


def _complete_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the complete rows; the last line may be incomplete."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


EARLY_S = 60
"""Seconds by which Slurm may send a signal too early, according to the manual of sbatch."""


def problems(job: Job, outer: int | None) -> list[Problem]:
    """Returns problems that can be found without a plan.

    ``outer``: ranks that torchrun or srun has started.
    """
    slurm = job.launch.slurm
    if slurm is None:
        return []
    problems = frozen_request.problems(job, KEY, "Slurm", outer)
    if outer is not None:
        return problems
    problems = [*cluster_problems(slurm), *problems]
    seconds = None if slurm.time is None else time_s(slurm.time)
    before = with_signal_s(slurm, _run(job))[0].signal_s or 0
    if seconds is not None and seconds <= before + EARLY_S:
        early = f"{before + EARLY_S} s before it ({KEY}.signal_s={before}, and up to {EARLY_S} s earlier)"
        text = f"{slurm.time}: the time limit is too short: Slurm may send the signal to save {early}"
        text += ", at the start of the job"
        problems.append(Problem(f"{KEY}.time", text))
    return problems


def _run(job: Job) -> tuple[Path, ...]:
    """Returns the run folder, if the run has been started before."""
    return () if job.run_dir is None else (Path(job.run_dir),)


def submit(job: Job, plan: Plan, run: Path) -> str:
    """Writes the job into the run folder, and submits it to Slurm.

    Returns the job number, or "" if the job is only written. Raises ``RunError``.
    """
    assert job.launch.slurm is not None
    slurm, note = with_signal_s(job.launch.slurm, (run,))
    if note is not None:
        say(str(note))
    from launcher.runtime.cluster.messages import private_file  # imports torch

    secret = private_file(run.absolute() / slurm_files.SECRET)
    at = RunPaths(run.absolute(), Path.cwd(), Path(os.path.abspath(sys.executable)), secret)
    ranks = ranks_of(job, frozen_request.write(job, plan, run))
    write_text(run / slurm_files.SCRIPT_FILE, slurm_files.batch_text(job.name, slurm, ranks, at))
    if not slurm.submit:
        return ""
    return sbatch(at.run / slurm_files.SCRIPT_FILE)


def ranks_of(job: Job, each: int) -> RankLayout:
    """Returns the ranks of the job; ``each``: the number of ranks per node."""
    return RankLayout(job.launch.nnodes, each, job.launch.device != "cpu", job.launch.max_restarts)


def sbatch(file: Path) -> str:
    """Submits ``file``; returns the job number. Raises ``RunError``."""
    return ask(["sbatch", "--parsable", str(file)]).strip().partition(";")[0]


def time_s(text: str) -> float:
    """Returns the seconds of a time as Slurm writes it: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    >>> time_s("30"), time_s("1:30"), time_s("02:00:00"), time_s("1-12")
    (1800.0, 90.0, 7200.0, 129600.0)
    """
    days, dash, clock = text.rpartition("-")
    parts = [int(n) for n in re.split(":", clock)]
    if dash:
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:
        parts = [0, parts[0], 0]
    elif len(parts) == 2:
        parts = [0, *parts]
    hours, minutes, seconds = parts
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)
