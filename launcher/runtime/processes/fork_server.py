"""A process that has only imported modules, from which all other processes of a run are forked.

A fork is cheap and shares what is imported, but it inherits the state of its parent. Once a parent has run a
backward on a machine with an accelerator, started OpenMP's threads, initialized a device, or imported user
code that did so, its forks cannot use autograd or the device. So the parent of ranks and of planner workers
is never the process that plans: it is this server, which imports torch and the launcher, runs none of their
operations and no user code, and forks a child for each request.

The server of the command ``launcher`` is a fork of it, made before anything is planned. In any other program
(a script, a notebook, a test) the server is a new interpreter, since that program may have done anything.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from launcher.errors import RunError
from launcher.runtime import gc_thresholds
from launcher.runtime.run_folder import lock_descriptors
from launcher.runtime.signals import STOPS

Function = Callable[..., object]
"""The function of a child: ``function(line, *args)``; ``line`` connects to the process that requested it."""

PLANNED_WITH = (
    "torch",
    "launcher.models.build",
    "launcher.parallel.deferred_init.constructor",
    "launcher.parallel.stages",
    "launcher.parallel.tensor_parallel.apply",
    "launcher.parallel.trace.build_graph",
)
"""Modules that planning needs anyway: the command imports them before the fork, to share their pages."""

PRELOADED = (
    *PLANNED_WITH,
    "launcher.runtime.processes.supervise",
    "launcher.steps.on_ranks",
    "launcher.steps.train",
    "launcher.steps.evaluate",
    "launcher.steps.save",
    "launcher.runtime.training.loop",
    "numpy.ma",  # np.unique imports it; that writes to every module, so each rank would copy 12 MB
)
"""Modules that the server imports, so that its children share them."""


_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ForkedChild:
    """A child: ``connection`` carries objects both ways, ``pidfd`` is readable once the child has ended."""

    connection: Connection
    pidfd: int

    def kill(self) -> None:
        """Kills the child; does nothing if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Closes both descriptors. A child that waits for the next object ends then."""
        self.connection.close()
        os.close(self.pidfd)

    def ended(self) -> str:
        """Describes an unexpected end of the child. Only the server could learn its exit code."""
        return "has ended: a user or the system killed it (out of memory? see dmesg)"


class ForkServer:
    """One server, started when it is first needed; several threads may use it."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Starts the server; it imports in parallel to this process."""
        with self._lock:
            if self._control is None:
                self._control = self._fork() if _forks_left else self._execute()

    def start(self, function: Function, *args: object) -> ForkedChild:
        """Runs ``function(line, *args)`` in a new child, in this process's folder and environment.

        Everything must be picklable. The child ends when the function returns, and when the server ends. A
        server that was killed is replaced once. Raises ``RunError`` if the second one has ended as well.
        """
        for again in (False, True):
            self.prepare()
            near, far = socket.socketpair()
            try:
                with far, self._lock:
                    assert self._control is not None
                    socket.send_fds(self._control, [b"+"], [far.fileno()])
                return _called(near, function, args)
            except (OSError, EOFError) as error:  # it was killed or failed to import: try another one
                near.close()
                self.stop()
                if again:
                    text = (
                        "the process that ranks are forked from has ended twice; its last messages are above"
                    )
                    raise RunError(f"{text}{_memory_limit()}") from error
        raise AssertionError("the second time returns or raises")

    def stop(self) -> None:
        """Ends the server, and with it all of its children."""
        with self._lock:
            control, self._control = self._control, None
        if control is None:
            return
        control.close()
        if self._process is not None:
            self._process.wait()
        else:
            os.waitpid(self._pid, 0)

    def _fork(self) -> socket.socket:
        global _forks_left
        _forks_left -= 1
        for name in PLANNED_WITH:
            importlib.import_module(name)
        gc_thresholds.freeze()
        near, far = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            near.close()
            _serve(far)
        far.close()
        return near

    def _execute(self) -> socket.socket:
        near, far = socket.socketpair()
        code = "import sys, json; sys.path[:] = json.loads(sys.argv[1])"
        code = f"{code}; from {__name__} import executed; executed(int(sys.argv[2]))"
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        words = [sys.executable, *flags, "-c", code, json.dumps(sys.path), str(far.fileno())]
        with far:
            self._process = subprocess.Popen(words, pass_fds=[far.fileno()])
        return near


def _memory_limit() -> str:
    """Returns a text with the limit of ``ulimit -v``, which may have ended the process; "" without one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"; this process may use {limit >> 20} MB of memory (ulimit -v), which may be too little"


_server: ForkServer | None = None
_forks_left = 0
"""How many more servers may be forks of this process."""


def only_imported() -> None:
    """Declares that this process only imports until its first server starts, which may be a fork of it."""
    global _forks_left
    _forks_left = 1


@contextmanager
def serving_from_here() -> Iterator[None]:
    """Starts the server as a fork of this script, so that ranks can run functions of the script itself.

    Another server cannot import ``__main__``. The script must only have imported modules.
    """
    only_imported()
    with serving() as server:
        server.prepare()
        yield


def fork_from_here() -> None:
    """Servers of this process are always forks of it. For tests, which patch imported modules."""
    global _forks_left
    _forks_left = sys.maxsize


def single_threaded() -> bool:
    """Returns true if this process has a single thread, so that a fork copies all of it."""
    return len(os.listdir("/proc/self/task")) == 1


@contextmanager
def serving() -> Iterator[ForkServer]:
    """Yields the existing server of this process, or a new one that ends with the block."""
    global _server
    if _server is not None:
        yield _server
        return
    _server = own = ForkServer()
    try:
        yield own
    finally:
        _server = None
        own.stop()


def prepare_server() -> None:
    """Starts the server of this process, if it is ``serving``: it imports in parallel to what follows."""
    if _server is not None:
        _server.prepare()


def start_here(function: Function, *args: object) -> ForkedChild:
    """Like ``ForkServer.start``, but forks this process, so nothing is pickled.

    For tests, whose work is a closure over patched modules. This process must only have imported modules.
    """
    near, far = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        near.close()
        _child(Connection(far.detach()), lambda line: function(line, *args), os.getppid())
    far.close()
    line = ForkedChild(Connection(near.detach()), os.pidfd_open(pid))
    threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()
    return line


@dataclass(frozen=True)
class _Surroundings:
    """The state that a child takes over from its starter; ``locks``: how many descriptors follow."""

    folder: str
    environ: dict[str, str]
    path: list[str]
    argv: list[str]
    locks: int

    def enter(self) -> None:
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path
        sys.argv[:] = self.argv


def _called(near: socket.socket, function: Function, args: tuple[object, ...]) -> ForkedChild:
    """Sends a forked child its function, and returns the connection to it."""
    [pidfd] = reduction.recvfds(near, 1)
    line = ForkedChild(Connection(near.detach()), pidfd)

    # the child shares the locks of this process: no other run may begin before the last child has ended
    locks = sorted(lock_descriptors)
    here = _Surroundings(os.getcwd(), dict(os.environ), list(sys.path), list(sys.argv), len(locks))
    line.connection.send((here, function, args))
    if locks:
        with socket.socket(fileno=os.dup(line.connection.fileno())) as near:
            reduction.sendfds(near, locks)
    return line


def executed(fd: int) -> NoReturn:
    """Runs a server in its own interpreter; ``fd`` is its end of the control socket."""
    gc_thresholds.seldom()
    _serve(socket.socket(fileno=fd))


def _serve(control: socket.socket) -> NoReturn:
    """Imports, then forks a child for each received descriptor, until the control socket is closed."""
    code = 1
    try:
        for signum in STOPS:  # the terminal signals all processes; this one ends with its owner
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
        for name in PRELOADED:
            importlib.import_module(name)
        gc.freeze()
        me = os.getpid()
        while True:
            message, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                break
            if os.fork() == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                far = socket.socket(fileno=fds[0])
                reduction.sendfds(far, [os.pidfd_open(os.getpid())])
                _child(Connection(far.detach()), _requested, me)
            os.close(fds[0])
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; exits at once if ``parent`` has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _requested(line: Connection) -> None:
    here, function, args = line.recv()
    if here.locks:
        with socket.socket(fileno=os.dup(line.fileno())) as far:
            reduction.recvfds(far, here.locks)
    here.enter()
    function(line, *args)


def _child(line: Connection, run: Callable[[Connection], Any], parent: int) -> NoReturn:
    """Runs a forked child: it ends with its parent, and never returns into its parent's frames."""
    code = 1
    try:
        die_with(parent)
        run(line)
        code = 0
    except (EOFError, ConnectionError):  # the requesting process has ended
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
