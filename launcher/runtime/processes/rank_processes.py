"""Rank processes: forked by a common parent, signalled and reaped by the supervisor.

The parent is a child of the clean server (``fork_server``). It constructs once what all ranks share, forks
them, reports their exit codes to the supervisor, and kills them when the supervisor has ended.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection

from launcher.runtime.preemption import STOPS
from launcher.runtime.processes.channel import Inbox
from launcher.runtime.processes.fork_server import Line, single_threaded
from launcher.runtime.processes.worker import Task, Work, run_rank

Start = Callable[..., Line]
"""``ForkServer.start``, or another function that runs ``function(line, *args)`` in a new process."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Child:
    """A started rank: ``pidfd`` is readable when it has ended, ``inbox`` yields what it sends."""

    rank: int
    pid: int
    pidfd: int
    inbox: Inbox = field(compare=False)
    parent: RankParent = field(compare=False)

    def send_signal(self, signum: int) -> None:
        """Sends a signal; allowed only before ``reap``. Does nothing if the rank has ended."""
        try:
            signal.pidfd_send_signal(self.pidfd, signum)
        except ProcessLookupError:
            return

    def reap(self) -> int:
        """Waits for the end and releases the process; returns the exit code, negative for a signal."""
        code = self.parent.exit_code(self.rank)
        os.close(self.pidfd)
        os.close(self.inbox.fd)
        return code


class RankParent:
    """The supervisor's end of the process that forks the ranks of one attempt."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._codes: dict[int, int] = {}

    @property
    def fd(self) -> int:
        """The descriptor that is readable when there is a rank to ``take``."""
        return self._line.connection.fileno()

    def take(self) -> Child | None:
        """The next forked rank; ``None`` if this parent cannot fork any."""
        try:
            word, *values = self._line.connection.recv()
            while word == "exit":
                self._codes[values[0]] = values[1]
                word, *values = self._line.connection.recv()
        except (EOFError, ConnectionError):  # it was killed or crashed in user code
            return None
        if word == "unfit":
            _log.debug("ranks share nothing: %s", values[0])
            return None
        rank, pid = values
        with socket.socket(fileno=os.dup(self.fd)) as line:
            pidfd, inbox = reduction.recvfds(line, 2)
        return Child(rank=rank, pid=pid, pidfd=pidfd, inbox=Inbox(inbox), parent=self)

    def exit_code(self, rank: int) -> int:
        """Waits until ``rank`` has ended; returns its exit code. Ranks are killed with their parent."""
        while rank not in self._codes:
            try:
                word, *values = self._line.connection.recv()
            except (EOFError, ConnectionError):
                return -signal.SIGKILL
            if word == "exit":
                self._codes[values[0]] = values[1]
        return self._codes[rank]

    def end(self) -> None:
        """Kills the process with its remaining ranks, and releases it."""
        self._line.kill()
        self._line.close()


def parent_of(task: Task, ranks: Sequence[int], start: Start) -> RankParent:
    """Starts the process that forks ``ranks``; ``take`` returns them one by one."""
    return RankParent(start(_fork_all, task, tuple(ranks)))


def _fork_all(line: Connection, task: Task, ranks: Sequence[int]) -> None:
    """The main function of the parent of ranks."""
    for signum in STOPS:  # the terminal signals all processes; the supervisor forwards what counts
        signal.signal(signum, signal.SIG_IGN)
    if task.share is not None:
        task, why = _shared(task, task.share)
        if why:
            line.send(("unfit", why))
            return
    task = replace(task, parent=os.getpid())
    gc.freeze()  # objects shared with ranks are not examined for garbage: that would copy their pages

    pidfds: dict[int, tuple[int, int]] = {}
    for rank in ranks:
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = _fork(line, task, rank, (read, write), [*pidfds])
        pidfd = os.pidfd_open(pid)
        os.close(write)
        line.send(("rank", rank, pid))
        with socket.socket(fileno=os.dup(line.fileno())) as to:
            reduction.sendfds(to, [pidfd, read])
        os.close(read)
        pidfds[pidfd] = rank, pid
    _tell_ends(line, pidfds)


def _shared(task: Task, share: Callable[[], Work]) -> tuple[Task, str]:
    """Constructs what ranks share; returns the task that uses it, and why they cannot share it, if so."""
    import torch

    torch.set_num_threads(task.threads)  # as in each rank, so that a constructor computes the same values
    try:
        task = replace(task, work=share())
    except Exception as error:  # each rank will report it when it constructs its own
        return task, f"{type(error).__name__}: {error}"
    if not single_threaded():
        return task, "code of the user's has started threads"
    return task, "user code has initialised a device" if _device_initialised() else ""


def _device_initialised() -> bool:
    """Whether torch has initialized the accelerator in this process: its runtime does not survive a fork."""
    import torch

    kind = torch.accelerator.current_accelerator()
    return kind is not None and bool(torch.get_device_module(kind.type).is_initialized())


def _fork(line: Connection, task: Task, rank: int, pipe: tuple[int, int], elders: Sequence[int]) -> int:
    """Forks a rank, which sends its results to the second descriptor of ``pipe``; returns its process id."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until the rank has its own handlers
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for fd in (pipe[0], line.fileno(), *elders):
            os.close(fd)
        code = run_rank(task, rank, pipe[1])
    except BaseException:  # errors that it could not report
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _tell_ends(line: Connection, pidfds: dict[int, tuple[int, int]]) -> None:
    """Reports each exit code to the supervisor until the last rank has ended; kills them if it has ended."""
    ready = select.poll()
    ready.register(line.fileno(), select.POLLIN)
    for fd in pidfds:
        ready.register(fd, select.POLLIN)
    while pidfds:
        for fd, _ in ready.poll():
            if fd == line.fileno():  # it never sends, so it has ended
                for pidfd in pidfds:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return
            rank, pid = pidfds.pop(fd)
            ready.unregister(fd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(fd)
            line.send(("exit", rank, code))
