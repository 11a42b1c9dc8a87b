"""The text of sbatch files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from signal import SIGUSR2

from launcher.errors import DONE, INTERRUPTED, REFUSED, REQUEUE
from launcher.job.schema.launch import Slurm
from launcher.run import frozen_request
from launcher.runtime.cluster.launch_env import SECRET_FILE

SCRIPT_FILE = "job.sbatch"
KILLED = 128 + SIGUSR2
"""A shell's exit code for a process that SIGUSR2 has ended."""
SECRET = ".secret"
"""The file of the secret, in the run folder or in the folder of all runs of one batch file."""
AGAIN = "again_if_failed"
"""The function in the batch file that restarts ranks after a failure."""


@dataclass(frozen=True)
class RunPaths:
    """The run folder, the folder in which the run was requested, and Python; all absolute paths.

    ``secret``: the file with the secret that signs messages between ranks; a job's text never contains it.
    """

    run: Path
    folder: Path
    python: Path
    secret: Path | None = None


@dataclass(frozen=True)
class RankLayout:
    """The ranks of a Slurm job.

    ``each``: ranks on each of ``nodes`` nodes; ``gpus``: whether each rank has its own GPU.

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


def batch_text(name: str, slurm: Slurm, ranks: RankLayout, at: RunPaths) -> str:
    """Returns the batch file, which runs the run folder's request in that folder whenever Slurm starts it."""
    head = [f"#SBATCH --{option}" for option in options(name, slurm, ranks, log(at.run, "%j"))]
    return "\n".join(["#!/bin/bash", *_about(at), *head, *_body(slurm, ranks, at)]) + "\n"


def options(name: str, slurm: Slurm, ranks: RankLayout, output: str) -> Iterator[str]:
    """Yields options of sbatch without dashes.

    The user's come last: of two equal options Slurm uses the last.
    """
    yield f"job-name={name}"
    yield f"nodes={ranks.nodes}"
    yield f"ntasks-per-node={ranks.each}"
    gpus = slurm.gpus_per_node if slurm.gpus_per_node is not None else ranks.each if ranks.gpus else 0
    if gpus:
        yield f"gpus-per-node={gpus}"
    if slurm.cpus_per_task is not None:
        yield f"cpus-per-task={slurm.cpus_per_task}"
    optional = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time}
    for option, value in optional.items():
        if value is not None:
            yield f"{option}={value}"
    yield f"signal=USR2@{slurm.signal_s}"  # "B:" would signal only the shell of this file
    yield "requeue"
    yield "open-mode=append"
    yield f"output={quote(output)}"
    yield from (option.removeprefix("--") for option in slurm.extra)


def log(folder: Path, job: str) -> str:
    """Returns the log's path for Slurm; ``job``: Slurm's pattern for the job number."""
    return f"{str(folder).replace('%', '%%')}/slurm-{job}.log"


def _about(at: RunPaths) -> Iterator[str]:
    yield "# Written by launcher for the run folder that contains this file. A stopped job is requeued;"
    yield f"# to resume a job that has failed: sbatch {quote(str(at.run / SCRIPT_FILE))}"


def _body(slurm: Slurm, ranks: RankLayout, at: RunPaths) -> Iterator[str]:
    yield from prologue(slurm, ranks, at.folder, at.secret)
    yield f"{ranks.start} {container(slurm)}{_command(at)}"
    yield "code=$?"
    yield f'if [ "$code" -eq {REQUEUE} ] || [ "$code" -eq {KILLED} ]; then'
    yield '    scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "$code"'


def prologue(slurm: Slurm, ranks: RankLayout, folder: Path, secret: Path | None) -> Iterator[str]:
    """Yields the lines before the command that starts the ranks."""
    yield "set -u"
    yield ""
    yield f"cd {quote(str(folder))} || exit 1"
    if slurm.cpus_per_task is not None:
        yield 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # since 22.05 srun does not inherit it'
    if secret is not None:
        yield f"export {SECRET_FILE}={quote(str(secret))}  # the secret that signs messages between ranks"
    yield from slurm.setup
    yield ""
    if ranks.restarts:
        yield from _again(ranks.restarts)
    before = f"# {slurm.signal_s} s before the time limit"
    yield f"{before} every task gets a signal, saves and exits with {REQUEUE};"
    yield f"# a task that is still starting is ended by the signal itself ({KILLED})."


def _again(times: int) -> Iterator[str]:
    yield f"# Ranks that fail resume from the last checkpoint, at most {times} times (launch.max_restarts)."
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


def _command(at: RunPaths) -> str:
    words: Sequence[str] = (str(at.python), "-m", "launcher", *frozen_request.words(at.run))
    return " ".join(map(quote, words))


NUMBERS = "jobs.json"
"""A file next to the run folders: the job number of each run, by name."""
LOG = '"${run//%/%%}/slurm-$SLURM_JOB_ID.log"'
"""The log of a run's ranks, in its run folder."""


@dataclass(frozen=True)
class ManyRuns:
    """Many runs. ``runs``: their folders; ``ranks``: those of each run; ``folder``: the batch file's folder.

    All paths are absolute. ``started``: where the sweep was started; ``secret``: as in ``RunPaths``.
    """

    name: str
    runs: tuple[Path, ...]
    ranks: RankLayout
    slurm: Slurm
    folder: Path
    started: Path
    python: Path
    secret: Path | None = None


def array_text(many: ManyRuns) -> str:
    """Returns the batch file: each run has its folder, and runs again whenever Slurm restarts it."""
    made = [*_array(many)] if many.slurm.array else [*_allocation(many)]
    return "\n".join(["#!/bin/bash", *made]) + "\n"


def _array(many: ManyRuns) -> Iterator[str]:
    most = many.slurm.array_parallel
    yield "# Written by launcher: each task of this array is one run, and is requeued separately."
    yield from _head(many, many.ranks, "%A_%a")
    yield f"#SBATCH --array=0-{len(many.runs) - 1}{'' if most is None else f'%{most}'}"
    yield from prologue(many.slurm, many.ranks, many.started, many.secret)
    yield from _runs(many.runs)
    yield "run=${runs[$SLURM_ARRAY_TASK_ID]}"
    yield f"{many.ranks.start} {_log_options(many.slurm)}{_array_command(many)}"
    yield "code=$?"
    yield f'if [ "$code" -eq {REQUEUE} ] || [ "$code" -eq {KILLED} ]; then'
    yield '    scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "$code"'


def _allocation(many: ManyRuns) -> Iterator[str]:
    """Requests the job steps of all runs at once; each waits until nodes are free."""
    most, ranks = many.slurm.array_parallel or 1, many.ranks
    size = f"--nodes={ranks.nodes} --ntasks={ranks.nodes * ranks.each} --ntasks-per-node={ranks.each}"
    yield "# Written by launcher: the runs share this allocation; each has its own nodes while it runs."
    yield from _head(many, replace(ranks, nodes=ranks.nodes * most), "%j")
    yield from prologue(many.slurm, ranks, many.started, many.secret)
    yield from _runs(many.runs)
    yield "tasks=()"
    yield 'for run in "${runs[@]}"; do'
    yield f"    {ranks.start} --exclusive {size} {_log_options(many.slurm)}{_array_command(many)} &"
    yield "    tasks+=($!)"
    yield "done"
    yield "stopped=0 failed=0"
    yield 'for task in "${tasks[@]}"; do'
    yield '    wait "$task"'
    yield "    code=$?"
    yield f'    if [ "$code" -eq {REQUEUE} ] || [ "$code" -eq {KILLED} ]; then'
    yield "        stopped=1"
    yield '    elif [ "$code" -ne 0 ]; then'
    yield "        failed=1"
    yield "    fi"
    yield "done"
    yield 'if [ "$stopped" -eq 1 ]; then'
    yield '    scontrol requeue "$SLURM_JOB_ID"  # finished runs do not run again'
    yield "fi"
    yield 'exit "$failed"'


def _head(many: ManyRuns, ranks: RankLayout, job: str) -> Iterator[str]:
    output = log(many.folder, job)
    for option in options(many.name, many.slurm, ranks, output):
        yield f"#SBATCH --{option}"


def _runs(runs: Sequence[Path]) -> Iterator[str]:
    yield "runs=("
    yield from (f"    {quote(str(run))}" for run in runs)
    yield ")"


def _log_options(slurm: Slurm) -> str:
    return f"--output={LOG} --open-mode=append {container(slurm)}"


def _array_command(many: ManyRuns) -> str:
    start = f"{quote(str(many.python))} -m launcher"
    recipe, run_dir = frozen_request.words(many.folder / "RUN")
    if run_dir == f"run_dir={many.folder / 'RUN'}":
        return f'{start} "recipe=$run/{frozen_request.NAME}" "run_dir=$run"'

    # the override grammar reads this folder only in quotes, which end after the name of the run
    parts = (word.rpartition("/RUN") for word in (recipe, run_dir))
    return " ".join([start, *(f'{quote(head)}"/${{run##*/}}"{quote(tail)}' for head, _, tail in parts)])
