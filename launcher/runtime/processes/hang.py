"""Finds the rank that keeps the others waiting."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from launcher.parallel.mesh import to_host
from launcher.runtime import faults
from launcher.runtime.cluster import flight_recorder
from launcher.runtime.cluster.network import AFTERWARDS_S, NetworkView
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import Fault
from launcher.runtime.signals import deafen
from launcher.untrusted.files import open_below

ASK = signal.SIGRTMAX
ANSWER_S = 1.0
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ROUTES = (
    "/torch/_ops.py",
    "/torch/_compile.py",
    "/torch/_dynamo/",
    "/torch/utils/",
)  # inner frames of a collective, which are skipped
_FOR_DEVICE = "/launcher/parallel/mesh.py"


def answer(path: Path) -> None:
    """Makes the signal ``ASK`` write all threads' stacks to ``path``, even if native code holds the GIL."""
    file = open(open_below(path.parent, path.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w")  # noqa: SIM115
    faulthandler.register(ASK, file=file, all_threads=True, chain=False)
    _open.append(file)


_open: list[object] = []  # keeps the files open while the process lives


def halted(pid: int) -> bool:
    """Returns true if a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped a process of this machine."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def culprits(
    pids: Mapping[int, int], stack: Callable[[int], Path], ask: Callable[[int], None]
) -> dict[int, str]:
    """Returns the ranks that keep the others waiting, each with what it is doing.

    These are the ranks that a signal or a debugger has stopped. If there are none, they are the ranks whose
    stack does not end in a collective, as the stack of a waiting rank does. ``stack(rank)`` is the file that
    the rank writes its stack to when ``ask(rank)`` sends it the signal ``ASK``.
    """
    why = "it is stopped (SIGSTOP, Ctrl-Z or a debugger)"
    paused = {rank: why for rank, pid in pids.items() if halted(pid)}
    if paused:
        return paused

    # request each stack, and allow some time to write it
    for rank in pids:
        ask(rank)
    end = time.monotonic() + ANSWER_S
    texts = dict.fromkeys(pids, "")
    while time.monotonic() < end and not all(map(_complete, texts.values())):
        time.sleep(0.02)
        texts = {rank: _read(stack(rank)) for rank in pids}
    return {rank: _position(text, pids[rank]) for rank, text in texts.items() if not waits(text)}


def _complete(text: str) -> bool:
    """Returns true if a text has frames and ends after a full line, so that a stack is probably complete."""
    return bool(text) and text.endswith("\n") and bool(_FRAME.findall(text))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def waits(text: str) -> bool:
    """Returns true if the main thread's stack, or that of a thread it waits for, ends in a collective."""
    blocks = [_FRAME.findall(block) for block in re.split(r"\n\n", text)]
    if not blocks or not blocks[-1]:
        return False
    if "/threading.py" in blocks[-1][0][0]:
        return any(map(_collective, blocks))
    return _collective(blocks[-1])


def _collective(frames: list[tuple[str, str, str]]) -> bool:
    """Returns true if a stack ends in a collective, or in the one place where a step waits for its device.

    With NCCL it is the device that waits in the collective.
    """
    file, _, name = next((f for f in frames if not any(route in f[0] for route in _ROUTES)), ("", "", ""))
    return "/torch/distributed/" in file or (file.endswith(_FOR_DEVICE) and name == to_host.__name__)


def _position(text: str, pid: int) -> str:
    """Returns the main thread's innermost frame, if possible outside of packages and the standard library."""
    frames = _FRAME.findall(text.split("\n\n")[-1])
    if not frames:
        waiting = ", because it waits for a disk or a device"
        return "it does not answer" + (waiting if _state(pid) == "D" else "")
    library = (os.path.dirname(threading.__file__) + os.sep,)
    own = [f for f in frames if "/site-packages/" not in f[0] and not f[0].startswith((*library, "<"))]
    file, line, name = (own or frames)[0]
    return f"it is at {file}:{line}, in {name}"


CAUSE_S = 2.0  # the most seconds to wait for a fault that is not just an echo of another rank's


HostAndPid = Callable[[int], str]
"""The host and process id of a rank, as ``host 123``; empty if unknown."""


def error_to_raise(
    error: BaseException,
    world: World,
    folder: Path,
    where: HostAndPid,
    timeout_s: float,
    network: NetworkView | None = None,
    *,
    skip: str,
) -> BaseException:
    """Writes this rank's fault, and returns the error to raise: a ``RanksFailed`` on the rank that reports.

    Rank 0 reports; if it is dead or hangs, the first remaining rank does. ``network`` is the network between
    the nodes of the run, which may be the cause.
    """
    deafen()  # never undone: the outer launcher stops this process because of the fault that it reports

    # write this rank's fault for the others to read
    mine = None
    if not isinstance(error, faults.Interrupted):
        mine = faults.raised(world.rank, world.attempt, error, skip)
        if mine.late:
            flight_recorder.write(folder, world.rank)
        faults.write(mine, folder)
        if not mine.explains_itself:
            _tell_torchrun(error)

    # the reporting rank waits for the faults of the others; the rest leave
    if world.rank and (mine is None or not mine.echo):
        return error
    rank_faults = _written(folder, world, patient=mine is not None and mine.echo)
    if world.rank and world.rank != min((f.rank for f in rank_faults), default=0):
        return error

    # only echoes: the cause is the network, or a rank that has written nothing
    if mine is not None and all(f.echo for f in rank_faults):
        cut = None if network is None else _cut(rank_faults, world, timeout_s, network)
        silent = {*range(world.size)} - {f.rank for f in rank_faults}
        rank_faults += _silent(silent, world, where, timeout_s) if cut is None else [cut]
    if not rank_faults:
        return error
    return faults.failed(rank_faults, folder=folder)


def _written(folder: Path, world: World, patient: bool) -> list[Fault]:
    """Returns the faults that ranks of this attempt have written.

    If ``patient``, waits for one that is no echo.
    """
    end = time.monotonic() + CAUSE_S
    while True:
        read = [Fault(**json.loads(f.read_text(encoding="utf-8"))) for f in folder.glob("errors/rank*.json")]
        rank_faults = [f for f in read if f.attempt == world.attempt]
        over = (
            any(not f.echo for f in rank_faults) or len(rank_faults) == world.size or time.monotonic() > end
        )
        if not patient or over:
            return rank_faults
        time.sleep(0.05)


def _cut(rank_faults: list[Fault], world: World, timeout_s: float, network: NetworkView) -> Fault | None:
    """Returns the fault of a network that kept nodes waiting for each other.

    Returns ``None`` if there is another cause. If another node does not answer now, the cause is the network
    or, unless ranks of that node report a timeout, that node itself. If all nodes answer, the network may
    have been the cause if every rank waited until its timeout.
    """
    late = {network.nodes.get(f.rank, "") for f in rank_faults if f.late}
    limit = f"for {timeout_s:g} s (launch.timeout_s)"
    for one in network.unreached(AFTERWARDS_S, refused=False):
        ends = f"{one.source} does not reach {one.target}: {one.why}"
        if one.target.node in late:
            text = f"(on {one.source.node}) and the ranks of {one.target.node} waited for each other {limit}"
            return _lost(world.rank, world, f"{text}: the network between them is the cause: {ends}")
        text = f"(on {one.source.node}) waited for {one.target.node} {limit}"
        cause = f"the network between them, or {one.target.node} itself, is the cause"
        return _lost(world.rank, world, f"{text}: {cause}: {ends}")
    if len(late) > 1 and len(rank_faults) == world.size and all(f.late for f in rank_faults):
        text = f"and the other ranks, on {' and '.join(sorted(late))}, waited for each other {limit}"
        cause = "the network between these nodes, which works again now, or ranks that do not call the same"
        return _lost(world.rank, world, f"{text}: the cause is {cause} collectives")
    return None


def _silent(ranks: Iterable[int], world: World, where: HostAndPid, timeout_s: float) -> list[Fault]:
    """Returns faults of ranks that wrote none.

    If some are known to be dead or stopped, only theirs; else one for each rank whose state is unknown.
    """
    known: list[Fault] = []
    unseen: list[Fault] = []
    for rank in sorted(ranks):
        host, _, pid = where(rank).partition(" ")
        here = host == socket.gethostname()

        # the state of a process is known only on its own machine
        if here and not _lives(int(pid)):
            known.append(_lost(rank, world, "has died without a message (SIGKILL? out of memory? see dmesg)"))
        elif here and halted(int(pid)):
            why = "it is stopped (SIGSTOP, Ctrl-Z or a debugger)"
            known.append(faults.hung(rank, world.attempt, timeout_s, why))
        else:
            where_else = f", on {host}" if host else ""
            unseen.append(_lost(rank, world, f"does not answer: it died, or it hangs{where_else}"))
    return known or unseen


def _lives(pid: int) -> bool:
    """Returns true if the process is alive; a zombie, which its parent has not reaped yet, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def _lost(rank: int, world: World, text: str) -> Fault:
    return faults.silent(rank, world.attempt, "lost", text)


def _tell_torchrun(error: BaseException) -> None:
    """Adds the traceback to torchrun's own report."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
