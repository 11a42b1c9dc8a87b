"""One attempt of a run: starts ranks, watches them, reaps them.

The parent of the ranks is a child of the clean server (``fork_server``). It constructs once what all ranks
share, forks the ranks, reports their exit codes to the supervisor, and kills them if the supervisor ends.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection

from launcher.checkpoint.tensorfile.watched_folder import identity, still_there
from launcher.runtime.cluster.flight_recorder import nccl_file, written
from launcher.runtime.faults import Fault, aborted, died, hung, root, signal_name
from launcher.runtime.processes.fork_server import ForkedChild, single_threaded
from launcher.runtime.processes.hang import ASK, culprits, halted
from launcher.runtime.processes.worker import AttemptTask, Inbox, Work, run_rank
from launcher.runtime.signals import STOPS, StopFlag

Start = Callable[..., ForkedChild]
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

    def __init__(self, line: ForkedChild) -> None:
        self._line = line
        self._codes: dict[int, int] = {}

    @property
    def fd(self) -> int:
        """The descriptor that is readable when there is a rank to ``take``."""
        return self._line.connection.fileno()

    def take(self) -> Child | None:
        """Returns the next forked rank; ``None`` if this parent cannot fork any."""
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


def parent_of(task: AttemptTask, ranks: Sequence[int], start: Start) -> RankParent:
    """Starts the process that forks ``ranks``; ``take`` returns them one by one."""
    return RankParent(start(_fork_all, task, tuple(ranks)))


def _fork_all(line: Connection, task: AttemptTask, ranks: Sequence[int]) -> None:
    """Runs the parent of ranks: its main function."""
    for signum in STOPS:  # the terminal signals all processes; ranks get theirs from the supervisor
        signal.signal(signum, signal.SIG_IGN)
    if task.share is not None:
        task, why = _shared(task, task.share)
        if why:
            line.send(("unfit", why))
            return
    task = replace(task, parent=os.getpid())
    gc.freeze()  # the garbage collector skips shared objects: its writes would copy their pages

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


def _shared(task: AttemptTask, share: Callable[[], Work]) -> tuple[AttemptTask, str]:
    """Constructs what ranks share; returns the task that uses it, and why ranks cannot share it, or ""."""
    import torch

    torch.set_num_threads(task.threads)  # as in each rank, so that a constructor computes the same values
    try:
        task = replace(task, work=share())
    except Exception as error:  # each rank will report it when it constructs its own
        return task, f"{type(error).__name__}: {error}"
    if not single_threaded():
        return task, "user code has started threads"
    return task, "user code has initialized a device" if _device_initialized() else ""


def _device_initialized() -> bool:
    """Returns true if torch has initialized the accelerator here: its runtime does not survive a fork."""
    import torch

    kind = torch.accelerator.current_accelerator()
    return kind is not None and bool(torch.get_device_module(kind.type).is_initialized())


def _fork(
    line: Connection, task: AttemptTask, rank: int, pipe: tuple[int, int], elders: Sequence[int]
) -> int:
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
    """Reports each exit code to the supervisor; kills the remaining ranks if the supervisor has ended."""
    ready = select.poll()
    ready.register(line.fileno(), select.POLLIN)
    for fd in pidfds:
        ready.register(fd, select.POLLIN)
    while pidfds:
        for fd, _ in ready.poll():
            if fd == line.fileno():  # the supervisor never sends anything, so it has ended
                for pidfd in pidfds:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return
            rank, pid = pidfds.pop(fd)
            ready.unregister(fd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(fd)
            line.send(("exit", rank, code))


GRACE_S = 1.5  # seconds from the first failure or signal until the remaining ranks are killed
TICK_S = 1.0  # seconds between checks while no rank sends anything

OnMessage = Callable[[int, object], None]
Elsewhere = Callable[[], Fault | None]
"""Returns the fault of a rank that another process supervises, once there is one."""


@dataclass
class AttemptOutcome:
    """The outcome of an attempt.

    ``killed``: ranks killed after the grace period; ``signum``: the signal that the user sent; ``insisted``:
    the user sent a second one.
    """

    attempt: int
    results: dict[int, object] = field(default_factory=dict)
    faults: dict[int, Fault] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    signum: int | None = None
    insisted: bool = False


@contextmanager
def signal_pipe(signums: Sequence[int] = STOPS) -> Iterator[int | None]:
    """Yields a descriptor from which each signal can be read as one byte.

    Yields ``None`` outside the main thread, as only that one receives signals. Ignored signals stay ignored
    (``nohup``, a background job).
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return

    # a handler writes the number of its signal into a pipe
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)

    # except for signals that are ignored
    mine = [s for s in signums if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    before = {s: signal.signal(s, lambda signum, _: _note(write, signum)) for s in mine}
    try:
        yield read
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        late = _unread(read)
        os.close(read)
        os.close(write)
        for signum in late:  # it came after the last read of the descriptor
            signal.raise_signal(signum)


def _unread(fd: int) -> bytes:
    try:
        return os.read(fd, 64)
    except BlockingIOError:
        return b""


def _note(fd: int, signum: int) -> None:
    os.write(fd, bytes([signum]))


def all_here() -> Fault | None:
    """Returns the default ``elsewhere``: all ranks are children of this process."""
    return None


def watch(
    live: dict[int, Child],
    task: AttemptTask,
    stop: int | None,
    on_message: OnMessage | None,
    elsewhere: Elsewhere = all_here,
) -> AttemptOutcome:
    """Supervises the ranks in ``live`` until it is empty: each child is removed when it is reaped.

    After a failure, here or ``elsewhere``, ranks have ``GRACE_S`` to end. A byte from ``stop`` is a signal of
    the user: if ``task.polls``, ranks then save before they end, else they have ``GRACE_S`` as well. Without
    ``on_message``, messages are dropped. A rank that is halted for ``task.timeout_s`` counts as hung.
    """
    return _Supervisor(live, task, stop, on_message, elsewhere).run()


class _Supervisor:
    def __init__(
        self,
        live: dict[int, Child],
        task: AttemptTask,
        stop: int | None,
        on_message: OnMessage | None,
        elsewhere: Elsewhere,
    ) -> None:
        self._live = live
        self._task = task
        self._stop = stop
        self._on_message = on_message
        self._elsewhere = elsewhere
        self._peer: Fault | None = None
        self._deadline: float | None = None
        self._out = AttemptOutcome(task.attempt)
        self._halted: dict[int, float] = {}
        self._looked = time.monotonic()
        self._began = time.time_ns()
        self._flag = StopFlag()
        self._folder_gone = False
        self._home = None if self._task.folder is None else identity(self._task.folder)

    def run(self) -> AttemptOutcome:
        with selectors.DefaultSelector() as ready:
            if self._stop is not None:
                ready.register(self._stop, selectors.EVENT_READ, self._on_stop_request)
            for child in self._live.values():
                ready.register(child.inbox.fd, selectors.EVENT_READ, partial(self._heard, ready, child))
                ready.register(child.pidfd, selectors.EVENT_READ, partial(self._ended, ready, child))

            # handle children and signals, and check the ranks now and then, until the last has ended
            while self._live:
                for key, _ in ready.select(min(TICK_S, self._patience())):
                    key.data()
                if self._patience() == 0:
                    self._kill()
                self._look()
        return self._out

    def _patience(self) -> float:
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _look(self) -> None:
        """Checks folders, ranks elsewhere, and how long each rank here has been halted (SIGSTOP, debugger).

        A halted rank causes a timeout only if another rank waits for it in a collective.
        """
        seconds = time.monotonic() - self._looked
        if seconds < TICK_S:
            return
        self._looked += seconds

        # deleted folders
        if self._task.folder is not None:
            still_there(self._task.folder, self._home)
        meeting_place = self._task.rendezvous.folder
        if not self._folder_gone and not meeting_place.is_dir():
            self._folder_gone = True
            _log.warning(
                "%s was deleted: ranks that have not connected yet cannot connect any more", meeting_place
            )

        # ranks that other processes supervise
        if self._peer is None and (fault := self._elsewhere()) is not None:
            self._peer = fault
            self._hurry()

        # halted ranks
        at_most = min(seconds, 2 * TICK_S)  # this process may have been stopped as well
        for rank, child in self._live.items():
            self._halted[rank] = self._halted.get(rank, 0.0) + at_most if halted(child.pid) else 0.0
        if self._deadline is None and any(t > self._task.timeout_s for t in self._halted.values()):
            self._deadline = time.monotonic()

    def _hurry(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE_S

    def _kill(self) -> None:
        by_signal = self._out.signum is not None and (self._out.insisted or not self._task.polls)
        if not by_signal and all(f.echo for f in self._known()):
            self._accuse()
        for child in self._live.values():
            child.send_signal(signal.SIGKILL)
        self._out.killed |= self._live.keys()
        self._deadline = None

    def _known(self) -> list[Fault]:
        """Returns the faults of these ranks, and the one that was reported from elsewhere."""
        return [*self._out.faults.values(), *([] if self._peer is None else [self._peer])]

    def _accuse(self) -> None:
        """Adds a fault for each rank that hangs and so has caused the failure.

        All faults known so far are only consequences of it.
        """
        known = self._known()
        late = not known or root(known).late
        pids = {rank: child.pid for rank, child in self._live.items() if late or halted(child.pid)}
        stack = self._task.rendezvous.stack
        for rank, where in culprits(pids, stack, lambda rank: self._live[rank].send_signal(ASK)).items():
            self._out.faults[rank] = hung(rank, self._out.attempt, self._task.timeout_s, where)

    def _on_stop_request(self) -> None:
        """Handles the user's request to stop: ranks that poll save first. A second one ends all at once."""
        assert self._stop is not None
        for signum in _unread(self._stop):
            self._flag.note(signum)
            if self._out.signum is None:
                self._out.signum = signum
                for child in self._live.values():
                    child.send_signal(signal.SIGTERM)
                if self._task.polls:
                    text = "%s: stopping after a save; a second signal stops at once"
                    _log.warning(text, signal_name(signum))
                else:
                    self._hurry()

        # requested twice: no grace period
        if self._flag.insisted:
            self._out.insisted = True
            self._deadline = time.monotonic()

    def _heard(self, ready: selectors.BaseSelector, child: Child) -> None:
        if child.rank not in self._live:  # it ended in this round
            return
        self._take(child)
        if child.inbox.ended:
            ready.unregister(child.inbox.fd)

    def _take(self, child: Child) -> None:
        for kind, value in child.inbox.drain():
            if kind == "message" and self._on_message is not None:
                self._on_message(child.rank, value)
            elif kind == "result":
                self._out.results[child.rank] = value
            elif kind == "log":
                assert isinstance(value, logging.LogRecord)
                logging.getLogger(value.name).handle(value)
            elif kind == "fault":
                assert isinstance(value, Fault)
                self._out.faults.setdefault(child.rank, value)
                self._hurry()

    def _ended(self, ready: selectors.BaseSelector, child: Child) -> None:
        self._take(child)
        if child.inbox.fd in ready.get_map():
            ready.unregister(child.inbox.fd)
        ready.unregister(child.pidfd)
        del self._live[child.rank]
        code = child.reap()
        done = code == 0 and child.rank in self._out.results
        explained = child.rank in self._out.faults or child.rank in self._out.killed
        if not done and not explained:
            self._out.faults[child.rank] = self._unsaid(child.rank, code)
            self._hurry()

    def _unsaid(self, rank: int, code: int) -> Fault:
        """Returns the fault of a rank that reported none.

        If the rank's last collectives are in a new file, NCCL's watchdog ended the rank: nothing else writes
        such a file.
        """
        task = self._task
        if code == -signal.SIGABRT and task.folder is not None:
            dump = nccl_file(task.folder, rank)
            if dump in written(task.folder, self._began):
                return aborted(rank, self._out.attempt, task.timeout_s, dump)
        return died(rank, self._out.attempt, code)
