"""The batch file of one run: its options for Slurm, and how it resumes after being told to stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from signal import SIGUSR2

from launcher.errors import DONE, INTERRUPTED, REFUSED, REQUEUE
from launcher.job.schema.job import Slurm
from launcher.run.cluster_jobs import frozen_request
from launcher.runtime.cluster.launch_env import SECRET_FILE

NAME = "job.sbatch"
KILLED = 128 + SIGUSR2
"""A shell's exit code for a process that the signal has ended."""
SECRET = ".secret"
"""The file in the folder of a run, or in that of the runs of one batch file."""
AGAIN = "again_if_failed"
"""A function of the batch file."""


@dataclass(frozen=True)
class Place:
    """The run folder, the folder in which the run was requested, and Python; all absolute paths.

    ``secret``: the file with the secret that signs messages between ranks; a job's text never contains it.
    """

    run: Path
    folder: Path
    python: Path
    secret: Path | None = None


@dataclass(frozen=True)
class Ranks:
    """``each``: ranks on each of ``nodes`` nodes; ``gpus``: whether each rank has its own GPU.

    ``restarts``: how often all ranks are restarted in the same job after a failure.
    """

    nodes: int
    each: int
    gpus: bool
    restarts: int = 0

    @property
    def start(self) -> str:
        """The command that starts the ranks."""
        return f"{AGAIN} srun" if self.restarts else "srun"


def text(name: str, slurm: Slurm, ranks: Ranks, at: Place) -> str:
    """The batch file, which runs the run folder's request in that folder whenever Slurm starts it."""
    head = [f"#SBATCH --{option}" for option in options(name, slurm, ranks, log(at.run, "%j"))]
    return "\n".join(["#!/bin/bash", *_about(at), *head, *_body(slurm, ranks, at)]) + "\n"


def options(name: str, slurm: Slurm, ranks: Ranks, output: str) -> Iterator[str]:
    """Options of sbatch without dashes. The user's come last, as Slurm uses the last of two."""
    yield f"job-name={name}"
    yield f"nodes={ranks.nodes}"
    yield f"ntasks-per-node={ranks.each}"
    gpus = slurm.gpus_per_node if slurm.gpus_per_node is not None else ranks.each if ranks.gpus else 0
    if gpus:
        yield f"gpus-per-node={gpus}"
    if slurm.cpus_per_task is not None:
        yield f"cpus-per-task={slurm.cpus_per_task}"
    asked = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time}
    for option, value in asked.items():
        if value is not None:
            yield f"{option}={value}"
    yield f"signal=USR2@{slurm.signal_s}"  # "B:" would signal only the shell of this file
    yield "requeue"
    yield "open-mode=append"
    yield f"output={quote(output)}"
    yield from (option.removeprefix("--") for option in slurm.extra)


def log(folder: Path, job: str) -> str:
    """The log's path for Slurm; ``job``: Slurm's pattern for the job number."""
    return f"{str(folder).replace('%', '%%')}/slurm-{job}.log"


def _about(at: Place) -> Iterator[str]:
    yield "# Written by launcher, for the run folder that it is in. A job that was stopped is requeued;"
    yield f"# one that has failed goes on with: sbatch {quote(str(at.run / NAME))}"


def _body(slurm: Slurm, ranks: Ranks, at: Place) -> Iterator[str]:
    yield from prologue(slurm, ranks, at.folder, at.secret)
    yield f"{ranks.start} {container(slurm)}{_command(at)}"
    yield "code=$?"
    yield f'if [ "$code" -eq {REQUEUE} ] || [ "$code" -eq {KILLED} ]; then'
    yield '    scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "$code"'


def prologue(slurm: Slurm, ranks: Ranks, folder: Path, secret: Path | None) -> Iterator[str]:
    """The lines before the ranks."""
    yield "set -u"
    yield ""
    yield f"cd {quote(str(folder))} || exit 1"
    if slurm.cpus_per_task is not None:
        yield 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not take it over since 22.05'
    if secret is not None:
        yield f"export {SECRET_FILE}={quote(str(secret))}  # its ranks sign messages with what is in it"
    yield from slurm.setup
    yield ""
    if ranks.restarts:
        yield from _again(ranks.restarts)
    yield f"# {slurm.signal_s} s before its time is up every task is told to save, and exits with {REQUEUE};"
    yield f"# one that is still starting is ended by the signal itself ({KILLED})."


def _again(times: int) -> Iterator[str]:
    yield f"# Ranks that fail go on from their last checkpoint, {times} times at most (launch.max_restarts)."
    yield f"{AGAIN}() {{"
    yield f"    for ((left = {times}; ; left--)); do"
    yield '        "$@"'
    yield "        code=$?"
    yield '        case "$code" in'
    yield f"            {DONE} | {REFUSED} | {REQUEUE} | {INTERRUPTED} | {KILLED}) break ;;"
    yield "        esac"
    yield '        [ "$left" -gt 0 ] || break'
    yield "    done"
    yield '    return "$code"'
    yield "}"
    yield ""


def container(slurm: Slurm) -> str:
    return "" if slurm.container is None else f"--container-image={quote(slurm.container)} "


def _command(at: Place) -> str:
    words: Sequence[str] = (
        str(at.python), "-m", "launcher", f"recipe={at.run / frozen_request.NAME}", f"run_dir={at.run}",
    )  # fmt: skip
    return " ".join(map(quote, words))
