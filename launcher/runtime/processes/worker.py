"""A rank's process, and its channel to the supervisor."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher.checkpoint.tensorfile.watched_folder import watched
from launcher.runtime import faults, gc_thresholds, log
from launcher.runtime.cluster import flight_recorder
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.rendezvous import Rendezvous
from launcher.runtime.cluster.world import World, connect, no_stop_signal, place, world_at
from launcher.runtime.processes import hang
from launcher.runtime.processes.fork_server import die_with
from launcher.runtime.signals import STOPS, polled

_HEAD = struct.Struct("<Q")
_CHUNK = 1 << 16


class Outbox:
    """The rank's end of the pipe. Objects arrive complete and in the order sent, from any thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, kind: str, value: object) -> None:
        """Sends an object; blocks while the pipe is full.

        Pickling errors are raised before anything is written.
        """
        body = pickle.dumps((kind, value), protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            for part in (_HEAD.pack(len(body)), body):
                rest = memoryview(part)
                while rest:
                    rest = rest[os.write(self._fd, rest) :]


class Inbox:
    """The supervisor's end of the pipe.

    ``ended`` is set once the last writer is gone; an incomplete object of a dead rank is dropped.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.ended = False
        self._bytes = bytearray()

    def drain(self) -> Iterator[tuple[str, object]]:
        """Yields every complete object that has arrived; never blocks."""
        while not self.ended:
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return
            self._bytes += chunk
            self.ended = not chunk
            yield from self._complete_messages()

    def _complete_messages(self) -> Iterator[tuple[str, object]]:
        while len(self._bytes) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            kind, value = pickle.loads(memoryview(self._bytes)[_HEAD.size : end])
            del self._bytes[:end]
            yield kind, value


Work = Callable[[World], object]
_OWN = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # the others come from the terminal, to all at once


@dataclass(frozen=True)
class AttemptTask:
    """What every rank of one attempt receives. ``alone``: a single process without a process group.

    ``polls``: the work checks ``World.stop_signal`` and stops by itself. ``outer``: the place that an outer
    launcher assigned to the only rank of this process. ``share`` returns a replacement of ``work`` that uses
    what it has constructed once for all ranks; ``parent``: the process that forked this one.
    """

    work: Work
    size: int
    attempt: int
    device: str
    backend: str
    timeout_s: float
    threads: int
    folder: Path | None
    rendezvous: Rendezvous
    alone: bool = False
    polls: bool = False
    outer: Place | None = None
    share: Callable[[], Work] | None = None
    parent: int = 0


def run_rank(task: AttemptTask, rank: int, fd: int) -> int:
    """Does the work of ``rank``; returns the exit code.

    Sends ``("result", value)`` or ``("fault", Fault)`` to ``fd``.
    """
    box = Outbox(fd)
    gc_thresholds.as_usual()
    try:
        with nullcontext() if task.folder is None else watched(task.folder):
            stop_signal = _set_up_process(task, rank, box)
            box.send("result", _connect_and_run(task, rank, box, stop_signal))
        return 0
    except BaseException as error:  # SystemExit too: a rank must not end the run silently
        _tell(task, rank, box, error)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _connect_and_run(task: AttemptTask, rank: int, box: Outbox, stop_signal: Callable[[], int]) -> object:
    world = replace(_world(task, rank), send=partial(box.send, "message"), stop_signal=stop_signal)

    with nullcontext() if task.alone else _connected(world, task):
        try:
            return task.work(world)
        except faults.Preempted as stop:  # a result, as all ranks have agreed
            return stop
        except BaseException as error:
            _tell(task, rank, box, error)  # now: leaving the group may wait for a peer that waits for us
            raise


def _world(task: AttemptTask, rank: int) -> World:
    if task.outer is not None:
        return world_at(task.outer, task.device, task.backend)
    return World(
        rank=rank,
        size=task.size,
        local_rank=rank,
        local_size=task.size,
        attempt=task.attempt,
        device=place(task.device, rank),
        backend=task.backend,
    )


def _connected(world: World, task: AttemptTask) -> AbstractContextManager[None]:
    store = task.rendezvous.store(task.size, task.timeout_s)
    return connect(world, store, task.timeout_s, task.threads, folder=task.folder)


def _tell(task: AttemptTask, rank: int, box: Outbox, error: BaseException) -> None:
    """Sends the fault; the supervisor keeps the first one of a rank."""
    fault = faults.raised(rank, task.attempt, error, skip=__file__)
    if fault.late and task.folder is not None:
        flight_recorder.write(task.folder, rank)
    box.send("fault", fault)


def _set_up_process(task: AttemptTask, rank: int, box: Outbox) -> Callable[[], int]:
    """Sets up the process: it dies with its parent, and ignores signals of the terminal.

    Returns the function that reports a stop signal. A rank that does not poll is ended by other signals.
    """
    die_with(task.parent)

    # signals
    for signum in STOPS:
        handler = signal.SIG_DFL if signum in _OWN else signal.SIG_IGN
        signal.signal(signum, handler)
    stop_signal = polled(_OWN) if task.polls else no_stop_signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    # output: bypass the streams on which the supervisor draws its progress bar
    sys.stdout = sys.__stdout__
    sys.stderr = sys.__stderr__
    log.configure(rank, task.folder, log.Relay(partial(box.send, "log")))
    faulthandler.enable(file=2)
    hang.answer(task.rendezvous.stack(rank))

    os.environ.update(_variables(_world(task, rank), near=task.outer is None))
    return stop_signal


def _variables(at: World, near: bool) -> dict[str, str]:
    """Returns the variables that torch and users read.

    ``near``: gloo defaults to loopback, without a name service.
    """
    here = near and "lo" in {name for _, name in socket.if_nameindex()}
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if here else {}
    numbers = {"RANK": at.rank, "LOCAL_RANK": at.local_rank, "WORLD_SIZE": at.size}
    numbers["LOCAL_WORLD_SIZE"] = at.local_size
    return loopback | dict(os.environ) | {key: str(value) for key, value in numbers.items()}
