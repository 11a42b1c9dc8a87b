"""Finds the rank of an outer launcher that failed first, from the faults that ranks have written or not."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from launcher.runtime import faults
from launcher.runtime.cluster import flight_recorder
from launcher.runtime.cluster.network import AFTERWARDS_S, Network
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import Fault
from launcher.runtime.interrupts import deafen
from launcher.runtime.processes.hang import stopped

CAUSE_S = 2.0  # until the rank that failed first has written why, or every rank that it lost its peer


HostAndPid = Callable[[int], str]
"""Host and process id of a rank, as ``host 123``; empty when that cannot be known."""


def failed(
    error: BaseException,
    world: World,
    folder: Path,
    where: HostAndPid,
    timeout_s: float,
    network: Network | None = None,
    *,
    skip: str,
) -> BaseException:
    """Write down the failure; on the rank that tells it the error to raise is a ``RanksFailed``.

    That is rank 0, or, when it is dead or hangs, the first that is left. ``network`` is that between the
    nodes of the run, which can be the cause.
    """
    deafen()  # for good: the outer launcher ends us for what we tell now

    # our own fault, for the others to read
    mine = None
    if not isinstance(error, faults.Interrupted):
        mine = faults.raised(world.rank, world.attempt, error, skip)
        if mine.late:
            flight_recorder.write(folder, world.rank)
        faults.write(mine, folder)
        if not mine.told:
            _tell_torchrun(error)

    # the rank that tells waits for what others have to say; the rest leave
    if world.rank and (mine is None or not mine.echo):
        return error
    found = _written(folder, world, patient=mine is not None and mine.echo)
    if world.rank and world.rank != min((f.rank for f in found), default=0):
        return error

    # nobody but echoes: the network is to blame, or those who have said nothing
    if mine is not None and all(f.echo for f in found):
        cut = None if network is None else _cut(found, world, timeout_s, network)
        silent = {*range(world.size)} - {f.rank for f in found}
        found += _silent(silent, world, where, timeout_s) if cut is None else [cut]
    if not found:
        return error
    return faults.failed(found, folder=folder)


def _written(folder: Path, world: World, patient: bool) -> list[Fault]:
    """What ranks of this attempt have written; one that only lost its peer waits for the peer's fault."""
    end = time.monotonic() + CAUSE_S
    while True:
        read = [Fault(**json.loads(f.read_text(encoding="utf-8"))) for f in folder.glob("errors/rank*.json")]
        found = [f for f in read if f.attempt == world.attempt]
        over = any(not f.echo for f in found) or len(found) == world.size or time.monotonic() > end
        if not patient or over:
            return found
        time.sleep(0.05)


def _cut(found: list[Fault], world: World, timeout_s: float, network: Network) -> Fault | None:
    """The fault of a network that kept whole nodes waiting for each other; ``None``: it is another's.

    It is so where another node does not answer now and none of its ranks says more than that it has waited.
    Where all nodes answer it may have been so, if each rank has waited until its timeout.
    """
    late = {network.nodes.get(f.rank, "") for f in found if f.late}
    limit = f"for {timeout_s:g} s (launch.timeout_s)"
    for one in network.unreached(AFTERWARDS_S, refused=False):
        ends = f"{one.source} does not reach {one.target}: {one.why}"
        if one.target.node in late:
            text = f"(on {one.source.node}) and the ranks of {one.target.node} waited for each other {limit}"
            return _lost(world.rank, world, f"{text}: the network between them is the cause: {ends}")
        text = f"(on {one.source.node}) waited for {one.target.node} {limit}"
        cause = f"the network between them, or {one.target.node} itself, is the cause"
        return _lost(world.rank, world, f"{text}: {cause}: {ends}")
    if len(late) > 1 and len(found) == world.size and all(f.late for f in found):
        text = f"and the other ranks, on {' and '.join(sorted(late))}, waited for each other {limit}"
        cause = "the network between these nodes, which answers again now, or ranks that do not call the same"
        return _lost(world.rank, world, f"{text}: {cause} collectives")
    return None


def _silent(ranks: Iterable[int], world: World, where: HostAndPid, timeout_s: float) -> list[Fault]:
    """Faults of ranks that wrote none: those known to be dead or stopped, else all that cannot be seen."""
    known: list[Fault] = []
    unseen: list[Fault] = []
    for rank in sorted(ranks):
        host, _, pid = where(rank).partition(" ")
        here = host == socket.gethostname()

        # only of a process of this machine can more be known than that it is silent
        if here and not _lives(int(pid)):
            known.append(_lost(rank, world, "has died without a message (SIGKILL? out of memory? see dmesg)"))
        elif here and stopped(int(pid)):
            why = "it is stopped (SIGSTOP, Ctrl-Z or a debugger)"
            known.append(faults.hung(rank, world.attempt, timeout_s, why))
        else:
            where_else = f", on {host}" if host else ""
            unseen.append(_lost(rank, world, f"does not answer: it has died, or it hangs{where_else}"))
    return known or unseen


def _lives(pid: int) -> bool:
    """A zombie, whose parent has not looked yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def _lost(rank: int, world: World, text: str) -> Fault:
    return faults.silent(rank, world.attempt, "lost", text)


def _tell_torchrun(error: BaseException) -> None:
    """Its own report then has the traceback too."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
