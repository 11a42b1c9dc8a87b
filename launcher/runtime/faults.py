"""Finds which rank failed first, and describes it to the user."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from launcher.checkpoint.tensorfile.disk import unwritten, write_text
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.errors import INTERRUPTED, REQUEUE, RequestError, RunError
from launcher.runtime.cluster import flight_recorder
from launcher.untrusted.files import open_below

_log = logging.getLogger(__name__)

# Messages of a healthy rank that has lost another rank.
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection was likely closed",
    "Read error",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "Remote peer closed the connection",
    "Connect timeout",
    "barrier timeout after",
    "timed out connecting",
    "recvValueWithTimeout failed",
    "connectFullMesh",
    "Socket Timeout",
    "wait timeout after",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "Watchdog caught collective operation timeout",
    "has failed to connect",
)

DUMP_NS = 60_000_000_000
"""A dump may be this much older than the end of its rank: NCCL's watchdog waits for all ranks' dumps."""

_HINTS = {
    "SIGKILL": "out of memory? see dmesg",
    "SIGSEGV": "a crash in native code; its stack is in the rank's log",
    "SIGABRT": "native code aborted, as it does when the shapes of tensors differ between ranks",
    "SIGBUS": "a mapped file was truncated, or /dev/shm is full",
    "SIGTERM": "a user or the system ended only this rank",
}


@dataclass(frozen=True)
class Fault:
    """How one rank ended.

    ``type`` is the name of an exception or a signal, or ``exit``; ``echo``: the rank failed only because a
    peer did.
    """

    rank: int
    attempt: int
    type: str
    message: str
    traceback: str
    time_ns: int
    echo: bool = False

    @property
    def headline(self) -> str:
        if self.explains_itself:
            return f"rank {self.rank}: {self.message}"
        if self.traceback:
            return f"rank {self.rank}: {self.type}: {self.message}"
        return f"rank {self.rank} {self.message}"

    @property
    def late(self) -> bool:
        """True if the rank waited for a peer until a timeout; one that lost a connection reports none."""
        return self.echo and re.search("timeout|timed out", self.message, re.IGNORECASE) is not None

    @property
    def explains_itself(self) -> bool:
        """True if the message is ours and complete: the traceback into our code would not help the user."""
        return self.type in (RunError.__name__, OutOfMemory.__name__)


class OutOfMemory(RunError):
    """A rank ran out of memory; the message says what was planned and what frees memory."""


class RanksFailed(RunError):
    """Ranks have failed; ``fault`` is the root cause, ``faults`` are all failures."""

    def __init__(self, message: str, fault: Fault, faults: tuple[Fault, ...]) -> None:
        super().__init__(message)
        self.fault = fault
        self.faults = faults


class Interrupted(BaseException):
    """The user or the system asked this process to stop, and it stopped at once; this is no failure.

    ``insisted``: a second signal requested it.
    """

    def __init__(self, signum: int, insisted: bool = False) -> None:
        super().__init__(f"stopped by {signal_name(signum)}")
        self.signum = signum
        self.insisted = insisted

    @property
    def code(self) -> int:
        """The exit code."""
        return 128 + self.signum


class Preempted(Interrupted):
    """The run was asked to stop, and stopped at a point where nothing is lost: the same command resumes it.

    ``saved``: the checkpoint that was written.
    """

    def __init__(self, signum: int, saved: str | None = None) -> None:
        super().__init__(signum)
        self.saved = saved

    def __str__(self) -> str:
        where = f": saved {self.saved}, from which the same command resumes" if self.saved else ""
        return f"preempted by {signal_name(self.signum)}{where}"

    def __reduce__(self) -> tuple[type[Preempted], tuple[int, str | None]]:
        return Preempted, (self.signum, self.saved)

    @property
    def code(self) -> int:
        """The exit code: 130 after Ctrl-C, as in shells, else 75 (``EX_TEMPFAIL``: try again later)."""
        return INTERRUPTED if self.signum == signal.SIGINT else REQUEUE


def raised(rank: int, attempt: int, error: BaseException, skip: str = "") -> Fault:
    """Returns the fault of an exception.

    Frames of the file ``skip`` at the top of its traceback are left out.
    """
    error = _own(error)
    text = "".join(traceback.format_exception(type(error), error, _below(error.__traceback__, skip)))

    # it is an echo if any exception in the chain reports a lost peer
    echo = any(pattern in str(e) for e in _chain(error) for pattern in ECHOES)
    run_error = error if isinstance(error, RunError) else unwritten(error)
    kind = OutOfMemory if isinstance(error, OutOfMemory) else RunError
    return Fault(
        rank=rank,
        attempt=attempt,
        type=type(error).__name__ if run_error is None else kind.__name__,
        message=str(run_error or error),
        traceback=text.rstrip(),
        time_ns=time.time_ns(),
        echo=echo,
    )


def _own(error: BaseException) -> BaseException:
    """Returns the error that a stage raised, without the error that torch's pipeline wraps around it.

    Around autograd's own errors it stays: it has the shapes of the stage.
    """
    cause = error.__cause__
    if cause is None or not isinstance(error, RuntimeError):
        return error
    ours = "Failed to run stage backward" in str(error) and isinstance(cause, RequestError)
    return cause if ours or "failed to run forward:" in str(error) else error


def _below(frames: TracebackType | None, skip: str) -> TracebackType | None:
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == skip:
        frames = frames.tb_next
    return frames


def died(rank: int, attempt: int, code: int) -> Fault:
    """Returns the fault of a process that ended without an error report.

    ``code`` as in ``subprocess``: negative is a signal.
    """
    if code >= 0:
        return silent(rank, attempt, "exit", f"ended with exit code {code} and no Python error")
    name = signal_name(-code)
    hint = f" ({_HINTS[name]})" if name in _HINTS else ""
    return silent(rank, attempt, name, f"was killed by {name}{hint}")


def hung(rank: int, attempt: int, timeout_s: float, where: str) -> Fault:
    """Returns the fault of a rank that does not respond; ``where``: what is known of its current work."""
    return silent(rank, attempt, "hung", f"hung for {timeout_s:g} s (launch.timeout_s): {where}")


def aborted(rank: int, attempt: int, timeout_s: float, dump: Path) -> Fault:
    """Returns the fault of a rank that NCCL's watchdog ended: an echo, as it was waiting for another rank."""
    text = (
        f"waited for the other ranks in a collective that timed out after {timeout_s:g} s (launch.timeout_s)"
    )
    return replace(silent(rank, attempt, "SIGABRT", f"{text}; its last collectives: {dump}"), echo=True)


def silent(rank: int, attempt: int, kind: str, message: str) -> Fault:
    """Returns a fault, timed now, of a rank that raised no exception."""
    return Fault(rank=rank, attempt=attempt, type=kind, message=message, traceback="", time_ns=time.time_ns())


def signal_name(number: int) -> str:
    """Returns the name of a signal, ``SIGKILL`` for 9; real-time signals have no names."""
    known = {s.value: s.name for s in signal.Signals}
    return known.get(number, f"signal {number}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def root(faults: Iterable[Fault]) -> Fault:
    """Returns the earliest failure that is not an echo; if all are echoes, the earliest."""
    return min(faults, key=lambda f: (f.echo, f.time_ns))


def failed(
    faults: Iterable[Fault],
    killed: Iterable[int] = (),
    finished: Iterable[int] = (),
    folder: Path | None = None,
) -> RanksFailed:
    """Returns the error to raise: the root cause, its traceback, how the others ended, the log to read.

    ``killed``: ranks that were still running and were killed; ``finished``: ranks that returned a result.
    """
    # the root cause
    every = tuple(faults)
    first = root(every)
    lines = [first.headline]
    if first.traceback and not first.explains_itself:
        lines.append(first.traceback)

    # how the others ended
    lines += _others(first, [f for f in every if f is not first])
    late = sorted(killed)
    if late:
        lines.append(f"still running, so killed: {_ranks(late)}")
    done = sorted(finished)
    if first.echo and done:
        lines.append(f"had finished by then: {_ranks(done)} (one collective fewer than the others?)")

    if folder is not None:
        lines += _dumps(every, folder)
        lines.append(f"log: {log_file(folder, first.rank)}")
    return RanksFailed("\n".join(lines), first, every)


def _others(first: Fault, rest: list[Fault]) -> Iterator[str]:
    full = OutOfMemory.__name__  # its message has different figures on each rank
    same = sorted(
        f.rank for f in rest if f.type == first.type and (f.message == first.message or first.type == full)
    )
    if same:
        yield f"also failed, the same way: {_ranks(same)}"
    for fault in sorted(rest, key=lambda f: f.rank):
        if not fault.echo and fault.rank not in same:
            yield f"also failed: {fault.headline}"
    lost = sorted(f.rank for f in rest if f.echo and f.rank not in same)
    if lost:
        peer = "its peer" if len(lost) == 1 else "their peer"
        yield f"also ended: {_ranks(lost)} (lost {peer})"


def _dumps(faults: tuple[Fault, ...], folder: Path) -> Iterator[str]:
    """Yields a line with the files of the last collectives, if a rank timed out.

    Ignores dumps of earlier runs.
    """
    since = min(f.time_ns for f in faults) - DUMP_NS
    if any(f.late for f in faults) and flight_recorder.written(folder, since):
        yield f"last collectives of each rank that waited: {folder / 'logs' / 'flight-*'}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def log_file(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank{rank}.log"


def write(fault: Fault, folder: Path) -> None:
    """Appends to the rank's log, then writes ``errors/rank<N>.json``, replacing that of an earlier attempt.

    Under an outer launcher rank 0 polls for that file: it sees a complete file or none, and the log that the
    file points to exists then.
    """
    error = folder / "errors" / f"rank{fault.rank}.json"
    log = log_file(folder, fault.rank)
    text = f"{fault.traceback or fault.headline}\n"
    fields = json.dumps(asdict(fault), indent=2) + "\n"
    with _if_possible(log):
        make_folder(log.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(open_below(folder, log.relative_to(folder), flags), "a", encoding="utf-8") as file:
            file.write(text)
    with _if_possible(error):
        make_folder(error.parent)
        write_text(error, fields)


@contextmanager
def _if_possible(path: Path) -> Iterator[None]:
    """Ignores I/O errors: the failure itself must be reported, even if a full disk cannot store it."""
    try:
        yield
    except OSError as error:
        _log.debug("%s: %s", path, error.strerror)
