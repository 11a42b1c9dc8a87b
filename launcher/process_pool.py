"""A pool of child processes that answer tasks.

The search for a layout and the preparation of data use them. Tasks and answers are pickled values. A child
receives its next task while it works on the one before. Otherwise a large task and a large answer could block
each other: each side would wait for the other one to read.

This module imports only ``errors`` and ``user_errors``: a child that encodes text must not load torch.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol, TypeVar

from launcher.errors import RunError
from launcher.user_errors import user_error

AHEAD = 2
"""The most tasks that a child has at a time: the next one is ready while this process is busy."""
PROTOCOL = 5
STDERR = 2

T = TypeVar("T")
R = TypeVar("R")


class WorkerProcess(Protocol):
    """A child process: the connection to it, and ways to end it."""

    @property
    def connection(self) -> Connection: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...
    def ended(self) -> str:
        """Says how the child has ended, as a sentence without its subject."""


Start = Callable[[Callable[[Connection], None]], WorkerProcess]
"""Calls the function in a new process and passes it that process's end of the connection."""


@contextmanager
def workers(count: int, start: Start, description: str) -> Iterator[Workers]:
    """Starts ``count`` children and ends them with the block. Errors call a child ``description``."""
    children: list[WorkerProcess] = []
    try:
        for _ in range(count):
            children.append(start(serve))
        yield Workers(children, description)
    finally:
        for child in children:
            child.kill()  # its answers are no longer needed
        for child in children:
            child.close()


class Workers:
    """Children that take the next task when they are free."""

    def __init__(self, children: Sequence[WorkerProcess], description: str) -> None:
        self._children = children
        self._description = description
        self._queues: list[deque[int]] = [deque() for _ in children]
        self._knows: dict[int, set[Hashable]] = defaultdict(set)

    def map(
        self,
        do: Callable[[T], R],
        tasks: Iterable[T],
        *,
        prefer: Callable[[T], Hashable] | None = None,
        here: Callable[[T], R] | None = None,
    ) -> Iterator[R]:
        """Yields ``do(task)`` for each task, in order. Read all results before the next call.

        ``do`` is sent to each child once. ``tasks`` is read at most ``AHEAD`` tasks per child, and ``AHEAD``
        more, ahead of the results.

        Args:
            prefer: A child first takes tasks for which ``prefer`` returns what it returned for an earlier
                task of that child. All tasks are read at once.
            here: Does tasks in this process too, while the children are busy.

        Raises:
            RunError: A child has ended.
            Exception: ``do`` raised it. It is raised in the order of the tasks.
        """
        assert not any(self._queues), "the results of the call before were not all read"
        numbered = enumerate(tasks)
        most = sys.maxsize if prefer else AHEAD * (len(self._children) + 1)
        functions: dict[int, Callable[[T], R]] = dict.fromkeys(range(len(self._children)), do)
        open_: dict[int, T] = {}
        answers: dict[int, Any] = {}
        turn = 0
        while True:
            open_.update(islice(numbered, most - len(open_) - len(answers) - sum(map(len, self._queues))))
            self._send(open_, functions, prefer)
            if turn in answers:
                answer = answers.pop(turn)
                if isinstance(answer, _Raised):
                    raise answer.error
                yield answer
                turn += 1
            elif here is not None and open_:
                number = self._choose(len(self._children), open_, prefer)
                answers[number] = here(open_.pop(number))
                answers.update(self._receive(block=False))
            elif any(self._queues):
                answers.update(self._receive(block=True))
            else:
                return

    def _send(
        self,
        open_: dict[int, T],
        functions: dict[int, Callable[[T], R]],
        prefer: Callable[[T], Hashable] | None,
    ) -> None:
        """Sends a task to each idle child, and a second one while more than ``AHEAD`` tasks are left."""
        for depth in range(1, AHEAD + 1):
            for n, queue in enumerate(self._queues):
                if len(queue) < depth and len(open_) > (0 if depth == 1 else AHEAD):
                    number = self._choose(n, open_, prefer)
                    message = functions.pop(n, None), open_.pop(number)
                    with self._alive(self._children[n]):
                        _write(self._children[n].connection, message)
                    queue.append(number)

    def _receive(self, block: bool) -> Iterator[tuple[int, Any]]:
        """Yields the answers that have arrived, by the number of the task."""
        busy = {self._children[n].connection: n for n, queue in enumerate(self._queues) if queue}
        for connection in wait(list(busy), None if block else 0) if busy else ():
            assert isinstance(connection, Connection)
            n = busy[connection]
            with self._alive(self._children[n]):
                answer = _read(connection)
            yield self._queues[n].popleft(), answer

    def _choose(self, worker: int, open_: dict[int, T], prefer: Callable[[T], Hashable] | None) -> int:
        """Returns the number of the next task for this worker."""
        if prefer is None:
            return next(iter(open_))
        knows = self._knows[worker]
        chosen = min(open_, key=lambda number: (prefer(open_[number]) not in knows, number))
        knows.add(prefer(open_[chosen]))
        return chosen

    @contextmanager
    def _alive(self, child: WorkerProcess) -> Iterator[None]:
        """Wraps communication with a child. Raises ``RunError`` if the child has ended."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            raise RunError(f"{self._description} {child.ended()}") from error


@dataclass(frozen=True)
class _Raised:
    """The answer to a task that has raised ``error``."""

    error: Exception


def serve(connection: Connection) -> None:
    """Answers tasks. The process ends at once when its parent ends or closes the connection."""
    received: SimpleQueue[tuple[Callable[[Any], object] | None, Any]] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, received), daemon=True).start()
    do: Callable[[Any], object] | None = None
    while True:
        new, task = received.get()
        do = new or do
        assert do is not None
        try:
            answer = do(task)
        except Exception as error:  # raised in the parent
            answer = _Raised(_picklable(error))
        try:
            _write(connection, answer)
        except ConnectionError:  # the parent has ended
            return


def _receive(connection: Connection, received: SimpleQueue[Any]) -> NoReturn:
    code = 1
    try:
        while True:
            received.put(_read(connection))
    except (EOFError, ConnectionError):
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _picklable(error: Exception) -> Exception:
    """Returns ``error``, or a ``RunError`` with its message if ``error`` cannot be pickled and unpickled."""
    try:
        pickle.loads(pickle.dumps(error, PROTOCOL))
    except Exception:
        return RunError(user_error(error))
    return error


def _write(connection: Connection, value: object) -> None:
    """Pickles ``value`` straight into the connection: large texts and arrays are not copied on the way."""
    with os.fdopen(connection.fileno(), "wb", closefd=False) as stream:
        pickle.dump(value, stream, PROTOCOL)


def _read(connection: Connection) -> Any:
    """Reads one value that ``_write`` has written. Raises ``EOFError`` where the connection ends."""
    return pickle.load(_Exact(connection.fileno()))


class _Exact:
    """A file for pickle that never reads ahead: ``wait`` has to see the bytes that follow."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def readinto(self, buffer: bytearray | memoryview) -> int:
        view = memoryview(buffer)
        at = 0
        while at < len(view):
            count = os.readv(self._fd, [view[at:]])
            if not count:
                raise EOFError
            at += count
        return at

    def read(self, size: int) -> bytes:
        data = bytearray(size)
        self.readinto(data)
        return bytes(data)

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("pickles of protocol 5 have no lines")


CODE = """
import importlib, signal, sys
from multiprocessing.connection import Connection
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
connection = Connection(int(sys.argv[1]))
importlib.import_module(sys.argv[2])
connection.recv()(connection)
"""


class Interpreter:
    """A child in a new Python interpreter, with the import path and the environment of this process.

    ``module`` is imported at once, so that the first task does not wait for it. ``environ`` is added to the
    environment. Prints go to standard error: standard output belongs to the command.
    """

    def __init__(
        self, function: Callable[[Connection], None], module: str, environ: Mapping[str, str]
    ) -> None:
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        near, far = socket.socketpair()
        with near, far:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CODE, str(far.fileno()), module],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                pass_fds=(far.fileno(),),
                env={**os.environ, "PYTHONPATH": path, **environ},
            )
            self.connection = Connection(near.detach())
        try:
            self.connection.send(function)
        except OSError:  # the child has ended; its first task reports that
            return

    def kill(self) -> None:
        """Kills the child; does nothing if it has ended."""
        self._process.kill()

    def close(self) -> None:
        """Closes the connection and waits for the end of the child."""
        self.connection.close()
        self._process.wait()

    def ended(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "was killed; the system kills processes when memory runs out"
        if code == -signal.SIGABRT:
            return "was ended by SIGABRT, as native code is that gets no more memory"
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
