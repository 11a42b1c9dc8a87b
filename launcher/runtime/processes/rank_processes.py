"""Starts one rank process, by fork or by spawn, and signals and reaps it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from launcher.runtime.processes.channel import Inbox
from launcher.runtime.processes.worker import Task, run_rank


@dataclass(frozen=True)
class Child:
    """A started rank: ``pidfd`` turns readable when it has ended, ``inbox`` brings what it sends."""

    rank: int
    pid: int
    pidfd: int
    inbox: Inbox = field(compare=False)
    process: SpawnProcess | None = field(compare=False)

    def send_signal(self, signum: int) -> None:
        """Only before ``reap``; a rank that ended by itself meanwhile is no error."""
        try:
            signal.pidfd_send_signal(self.pidfd, signum)
        except ProcessLookupError:
            return

    def reap(self) -> int:
        """Waits for the end and lets the process go; returns the exit code, negative for a signal."""
        if self.process is None:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        else:
            self.process.join()
            assert self.process.exitcode is not None
            code = self.process.exitcode
        os.close(self.pidfd)
        os.close(self.inbox.fd)
        return code


def fork(task: Task, rank: int, started: list[Child]) -> Child:
    """A rank that has all that this process imported.

    ``started`` are its elders, whose ends of pipes it lets go. Nothing but imports may have happened here
    before: threads of a multi-threaded operation do not survive a fork.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    pid = os.fork()

    # the child
    if pid == 0:
        code = 1
        gc.freeze()  # what it shares with its parent is not searched for garbage: that would copy all of it
        try:
            for fd in (read, *(fd for child in started for fd in (child.pidfd, child.inbox.fd))):
                os.close(fd)
            code = run_rank(task, rank, write)
        finally:
            os._exit(code)

    os.close(write)
    return Child(rank=rank, pid=pid, pidfd=os.pidfd_open(pid), inbox=Inbox(read), process=None)


def spawn(task: Task, rank: int) -> Child:
    """A rank in a fresh interpreter, as CUDA needs; ``task`` must be picklable."""
    context = get_context("spawn")
    read, write = context.Pipe(duplex=False)
    process = context.Process(target=_spawned, args=(task, rank, write), name=f"rank {rank}")
    process.start()
    write.close()
    fd = os.dup(read.fileno())
    read.close()
    assert process.pid is not None
    pidfd = os.pidfd_open(process.pid)
    return Child(rank=rank, pid=process.pid, pidfd=pidfd, inbox=Inbox(fd), process=process)


def _spawned(task: Task, rank: int, write: Connection) -> None:
    os._exit(run_rank(task, rank, write.fileno()))
