"""``status``, ``logs`` and ``cancel`` of a run folder, also for runs that were started elsewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.checkpoint.store import complete_ones, incomplete, latest
from launcher.console import say
from launcher.errors import DONE, Problem, RequestError, RunError, error_text, printable
from launcher.job.schema.paths import unusable
from launcher.plan.values.text import bytes_text, many, scaled, seconds_text
from launcher.run import slurm, slurm_files
from launcher.run.submit_to_cluster import JOB, SKY
from launcher.runtime import console_log, run_folder
from launcher.runtime.run_folder import running_launcher
from launcher.untrusted.files import LINK, RefusedFile, brief, irregular, opened, parsed, read_json, stands

FIGURES = ("loss", "step", "steps", "step_ms", "tokens_per_s")
LAST = 1 << 20
"""Bytes read from the end of metrics.jsonl and of a log; a row or a line has a few hundred."""
ALIVE = ("submitted", "running", "preempted")
SHOWN = 3
"""The most runs of a folder that a message names."""
JOB_NUMBER = re.compile(r"\d+([_+]\d+)?")
"""Matches the number of a job, of a task of an array, or of a component of a heterogeneous job."""
WRITTEN = "written"
"""The status of a job that the user has to submit."""
SLURM_SAYS = "%T on %N, %M of %l, %r"


def carry_out(words: Sequence[str]) -> int:
    """Runs a command; ``words``: its name and a run folder. Raises ``RequestError``, ``RunError``."""
    run, status = check(words)
    show({"status": _status, "logs": _logs, "cancel": _cancel}[words[0]](run, status))
    return DONE


def check(words: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """Returns the run folder of a command, and its status.

    Raises ``RequestError`` if it is not that of a run.
    """
    name, *rest = words
    if len(rest) != 1 or rest[0].startswith("-"):
        text = f"{name}: takes one run folder, as launcher {name} runs/NAME/0001"
        raise RequestError((Problem("", text, "", tuple(words)),))
    if why := unusable(rest[0]):
        raise RequestError((Problem("", f"{name} {rest[0]}: {why}", "", tuple(words)),))
    run = Path(rest[0])
    status = run_folder.read_status(run)
    if status is None:
        text, cure = _not_a_run(name, run)
        raise RequestError((Problem("", f"{name} {run}: {text}", cure, tuple(words)),))
    return run, status


def _not_a_run(name: str, folder: Path) -> tuple[str, str]:
    """Returns why the command ``name`` cannot take ``folder``.

    Also returns the command with the newest run in it, if any. For ``cancel``, a run is proposed only if it
    is the only one that can be cancelled.
    """
    if not folder.is_dir():
        return "is not a folder", ""
    runs = _runs_below(folder)
    if not runs:
        return f"is not a run folder: it has no {run_folder.STATUS}", ""
    listed = ", ".join(f"{run} ({next(progress(run)).partition(':')[0]})" for run in runs[:SHOWN])
    more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
    order = ", the newest first" if len(runs) > 1 else ""
    text = f"is not a run folder; it contains {many(len(runs), 'run')}{order}: {listed}{more}"
    if name != "cancel":
        return text, shlex.join([name, str(runs[0])])
    alive = [run for run in runs if cancellable(run) is not None]
    if not alive:
        return f"{text}; none has a Slurm job to cancel", ""
    return text, shlex.join([name, str(alive[0])]) if len(alive) == 1 else ""


def _runs_below(folder: Path) -> list[Path]:
    """Returns the runs in ``folder``, or one folder below, with a readable status; the newest first."""
    changed_s = {}
    for pattern in ("*", "*/*"):
        for path in folder.glob(f"{pattern}/{run_folder.STATUS}"):
            run = path.parent
            if run.is_symlink() or run.parent.is_symlink():  # latest
                continue
            with suppress(OSError, RequestError):
                if run_folder.read_status(run) is not None:
                    changed_s[run] = path.stat().st_mtime
    return sorted(changed_s, key=lambda run: (changed_s[run], run), reverse=True)


def show(lines: Iterable[str]) -> None:
    """Prints ``lines``, whose parts may come from files that somebody else wrote."""
    say("\n".join(printable(line, "\t") for line in lines))


def progress(run: Path) -> Iterator[str]:
    """Yields the state of a run and its training progress; nothing if the folder is not that of a run."""
    status = run_folder.read_status(run)
    if status is None:
        return
    state = str(status.get("status"))
    here = _manifest(run) is None and _job(run, status) is None
    if state == "running" and here and running_launcher(run, patience_s=0) is None:
        state = "killed: the same command and run_dir resume it"
    yield state + (f": {status['error']}" if "error" in status else "")
    if kind := irregular(run / run_folder.NEXT_STATUS):
        yield f"the next start will be refused: {run / run_folder.NEXT_STATUS}: {kind}"
    try:
        row = _last_row(run / "metrics.jsonl")
    except OSError as error:
        yield f"its progress cannot be read: {error_text(error)}"
        return
    if row is not None:
        speed = "".join(scaled(row["tokens_per_s"])) + " tokens/s, " if "tokens_per_s" in row else ""
        took = seconds_text(row.get("step_ms", 0.0) / 1e3)
        yield f"step {row['step']} of {row.get('steps', '?')}, loss {_loss(row)}, {speed}{took} a step"


def _loss(row: Mapping[str, Any]) -> str:
    return "nan" if row["loss"] is None else f"{row['loss']:.4f}"


def cancellable(run: Path) -> str | None:
    """Returns the number of the run's Slurm job, if it has not ended."""
    status = run_folder.read_status(run)
    return _job(run, status) if status is not None and status.get("status") in ALIVE else None


def _status(run: Path, status: dict[str, Any]) -> Iterator[str]:
    """Yields the progress, what Slurm reports of the job, and the newest checkpoint."""
    state, manifest = status.get("status"), _manifest(run)
    yield from (f"{run}: {line}" if n == 0 else line for n, line in enumerate(progress(run)))
    newest = _newest(run / "checkpoints")
    if newest is not None:
        yield f"newest checkpoint: {newest.name}"
    yield from incomplete(run / "checkpoints", newest)
    if (number := _job(run, status)) is not None:
        yield f"job {number} of Slurm: {_slurm_state(number)}"
    if manifest is not None and state in (*ALIVE, WRITTEN):
        yield f"a job of Kubernetes; its state: {_asks(manifest)}"


def _newest(checkpoints: Path) -> Path | None:
    """Returns the newest complete checkpoint.

    If its MAC cannot be verified here, it is the one of the highest step.
    """
    try:
        return latest(checkpoints)
    except (ValueError, OSError):
        return next(iter(complete_ones(checkpoints)), None)


def _logs(run: Path, status: dict[str, Any]) -> Iterator[str]:
    """Yields the console output, and for a running run how to follow it.

    Slurm's log of the job takes precedence if it exists: it has the output of all nodes.
    """
    path, number = run / console_log.NAME, _job(run, status)
    if number is not None and (stands(of_job := run / f"slurm-{number}.log") or not stands(path)):
        path = of_job
    try:
        before, text = _end(run, path)
    except FileNotFoundError as error:
        raise RunError(f"{path}: {error.strerror}: it has not printed anything yet") from error
    except OSError as error:
        raise RequestError((Problem("run_dir", error_text(error)),)) from error
    if before:
        yield f"... {bytes_text(before)} before this are not shown: {path}"
    yield from text.decode(errors="replace").splitlines()
    if status.get("status") in ALIVE:
        yield f"to follow the output: tail -F {path}"


def _end(run: Path, path: Path) -> tuple[int, bytes]:
    """Returns the number of bytes before the last ``LAST`` of a file in ``run``, and their complete lines.

    Raises ``OSError``, also for links and files that are not regular.
    """
    for at in (path, *path.parents):
        if at == run:
            break
        if at.is_symlink():
            raise RefusedFile(at, LINK)
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - LAST))
        text = file.read(LAST)
    if size > LAST:
        text = text[text.find(b"\n") + 1 :]
    return max(0, size - len(text)), text


def _cancel(run: Path, status: dict[str, Any]) -> Iterator[str]:
    """Cancels the job with ``scancel``: a running one saves first, and is not requeued."""
    number, state, manifest = _job(run, status), status.get("status"), _manifest(run)
    if state not in (ALIVE if manifest is None else (*ALIVE, WRITTEN)):
        raise RunError(f"{run}: it is {state}, so there is nothing to cancel")
    if number is None:
        who = running_launcher(run, patience_s=0)
        if manifest is not None and who is None:
            raise RunError(f"{run}: it is a Kubernetes job: {_ends(manifest)} ends it after a save")
        cure = f"{who} runs it; end that process, and it saves" if who else "it was killed"
        raise RunError(f"{run}: it is not a Slurm job: {cure}")
    slurm.ask(["scancel", number])
    yield f"job {number} of Slurm is cancelled; if it was training, it saves, and the same command resumes it"


def _job(run: Path, status: dict[str, Any]) -> str | None:
    """Returns the Slurm job number, from the submission or the last start."""
    name = str(status.get("job", ""))
    number = status.get("slurm") or (name.rpartition(" ")[2] if name.startswith("slurm ") else None)
    return _of_array(run) if number is None else _job_number(number, run / run_folder.STATUS)


def _job_number(number: object, file: Path) -> str:
    """Returns ``number`` as an argument for Slurm's commands. Raises ``RequestError`` if it is none.

    Somebody else may have written the file: ``--me`` would cancel all jobs of the user.
    """
    if JOB_NUMBER.fullmatch(str(number)) is None:
        text = f"{file}: its Slurm job is {brief(number)}, which is not a job number"
        raise RequestError((Problem("run_dir", text),))
    return str(number)


def _of_array(run: Path) -> str | None:
    """Returns the job number of a sweep's cell that has not begun."""
    try:
        numbers = read_json(run.absolute().parent / slurm_files.NUMBERS)
    except (OSError, ValueError):
        return None
    number = numbers.get(run.absolute().name) if isinstance(numbers, dict) else None
    return None if number is None else _job_number(number, run.absolute().parent / slurm_files.NUMBERS)


def _manifest(run: Path) -> Path | None:
    """Returns the manifest of a job of Kubernetes or SkyPilot, which the user who applied it can query."""
    return next((run / name for name in (JOB, SKY) if (run / name).exists()), None)


def _asks(manifest: Path) -> str:
    return "sky jobs queue" if manifest.name == SKY else f"kubectl get -f {manifest}"


def _ends(manifest: Path) -> str:
    return "sky jobs cancel" if manifest.name == SKY else f"kubectl delete -f {manifest}"


def _slurm_state(number: str) -> str:
    if shutil.which("squeue") is None:
        return "unknown: there is no squeue on this machine"
    try:
        state = slurm.ask(["squeue", "--noheader", f"--jobs={number}", f"--format={SLURM_SAYS}"]).strip()
    except RunError:  # Slurm forgets jobs some minutes after their end
        state = ""
    return state or "no longer in the queue"


def _last_row(path: Path) -> dict[str, Any] | None:
    """Returns the last complete row of a step.

    Raises ``OSError`` for a file that exists and cannot be read.
    """
    try:
        _, text = _end(path.parent, path)
    except FileNotFoundError:
        return None
    for line in reversed(text[: text.rfind(b"\n") + 1].splitlines()):
        try:
            row = parsed(line)
        except ValueError:  # an incomplete line, or no row
            continue
        if isinstance(row, dict) and {"loss", "step"} <= row.keys() and all(_number(row, n) for n in FIGURES):
            return row
    return None


def _number(row: Mapping[str, Any], name: str) -> bool:
    """Returns true if a figure is a finite number or missing; a loss may be ``null`` or negative."""
    value = row.get(name, 0)
    if value is None or name == "loss":
        return name == "loss" and (value is None or _finite(value))
    return _finite(value) and value >= 0


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
