"""Starts ranks on this machine, restarts them when they fail, and returns their results."""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from launcher.runtime import faults
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.rendezvous import OuterRendezvous, rendezvous
from launcher.runtime.cluster.world import World, backend_of
from launcher.runtime.processes.fork_server import serving
from launcher.runtime.processes.supervise import (
    AttemptOutcome,
    Child,
    Elsewhere,
    OnMessage,
    RankParent,
    Start,
    all_here,
    parent_of,
    signal_pipe,
    watch,
)
from launcher.runtime.processes.worker import AttemptTask
from launcher.runtime.signals import later

T = TypeVar("T")
_log = logging.getLogger(__name__)


def run_ranks(
    work: Callable[[World], T],
    size: int,
    *,
    device: str = "cpu",
    backend: str | None = None,
    timeout_s: float = 600,
    folder: Path | None = None,
    max_restarts: int = 0,
    port: int | None = None,
    threads: int = 1,
    on_message: OnMessage | None = None,
    share: Callable[[], Callable[[World], T]] | None = None,
    start: Start | None = None,
    alone: bool = False,
    polls: bool = False,
) -> list[T]:
    """Runs ``work(world)`` on ``size`` connected ranks; returns their results in rank order.

    Ranks are forked from a process that has only imported (``fork_server``), so ``work`` and ``share`` are
    pickled, and so are results. Raises ``RanksFailed`` when the last of ``max_restarts + 1`` attempts has
    failed, ``Interrupted`` on a stop signal (only the main thread receives them), ``RequestError`` if the
    port is taken. No rank outlives the call or this process.

    Args:
        share: called once, in the process that the ranks are forked from. It returns the function that
            replaces ``work``, with what it has constructed for all ranks.
        start: starts that process; by default ``ForkServer.start`` of this process's server.
        timeout_s: limits each collective.
        on_message: called here as ``on_message(rank, obj)``, in the order in which a rank sent; an exception
            in it ends the run.
        folder: gets ``logs/rank<N>.log`` and ``errors/rank<N>.json``.
        alone: creates no process group.
        polls: the work checks ``world.stop_signal``, so the first signal leaves it time to raise
            ``Preempted`` on all ranks.
        port: ``None`` uses a file for the rendezvous, otherwise a TCP store on the loopback interface.
    """
    task = partial(
        AttemptTask,
        work=work,
        size=size,
        device=device,
        backend=backend or backend_of(device),
        timeout_s=timeout_s,
        threads=threads,
        folder=folder,
        alone=alone,
        polls=polls,
        share=share,
    )

    error: faults.RanksFailed | None = None
    with serving() as server, signal_pipe() as stop:
        for attempt in range(max_restarts + 1):
            if error is not None:
                text = "attempt %d of %d: %s; starting again"
                _log.warning(text, attempt, max_restarts + 1, error.fault.headline)
            with rendezvous(port) as place:
                tried = task(attempt=attempt, rendezvous=place)
                out = _attempt(tried, start or server.start, stop, on_message)
            error = _judge(out, tried)
            if error is None:
                return [cast(T, out.results[rank]) for rank in range(size)]
            if out.signum is not None:
                break

    assert error is not None, "max_restarts is negative"
    raise error


def run_outer_rank(
    work: Callable[[World], object],
    at: Place,
    store: str,
    *,
    folder: Path,
    device: str,
    backend: str | None,
    timeout_s: float,
    threads: int,
    on_message: OnMessage,
    elsewhere: Elsewhere,
) -> AttemptOutcome:
    """Runs ``work(world)`` as the rank of this process, in a child whose failure this process survives.

    Every rank that the outer launcher started calls it: the children connect through keys below ``store`` in
    the shared store. Each child is forked from the server, as a process with a store has threads; so ``work``
    must be picklable. ``folder`` belongs to this rank alone. ``elsewhere()`` returns the fault of another
    rank once there is one, which ends this child too. Failures of the child and signals are not raised but
    returned.
    """
    task = AttemptTask(
        work=work,
        size=at.size,
        attempt=at.attempt,
        device=device,
        backend=backend or backend_of(device),
        timeout_s=timeout_s,
        threads=threads,
        folder=folder,
        rendezvous=OuterRendezvous(folder, at=at, below=store),
        outer=at,
    )
    with serving() as server, signal_pipe() as stop:
        return _attempt(task, server.start, stop, on_message, ranks=[at.rank], elsewhere=elsewhere)


def _judge(out: AttemptOutcome, task: AttemptTask) -> faults.RanksFailed | None:
    """Raises if the user stopped the run. Returns the failure of the attempt; ``None`` if it succeeded."""
    # stopped: all ranks agreed and saved, or had no time to
    stop = next((r for r in out.results.values() if isinstance(r, faults.Preempted)), None)
    if stop is not None and not out.faults:
        raise faults.Preempted(out.signum or stop.signum, stop.saved)
    if out.signum is not None and (out.insisted or not task.polls or not (out.faults or out.results)):
        raise faults.Interrupted(out.signum, out.insisted)

    if not out.faults:
        if out.signum is not None:  # it came when the ranks had finished
            later(out.signum)
        return None

    # failed
    if task.folder is not None:
        for fault in out.faults.values():
            faults.write(fault, task.folder)
    killed = out.killed - out.faults.keys()
    return faults.failed(out.faults.values(), killed=killed, finished=out.results, folder=task.folder)


def _attempt(
    task: AttemptTask,
    start: Start,
    stop: int | None,
    on_message: OnMessage | None,
    *,
    ranks: Sequence[int] | None = None,
    elsewhere: Elsewhere = all_here,
) -> AttemptOutcome:
    """Runs one attempt of all ranks, or of ``ranks`` in this process."""
    # if user code has started threads or a device in the parent, it cannot fork: a second parent then forks
    # ranks without shared models
    local_ranks = range(task.size) if ranks is None else ranks
    out = None
    if task.share is not None:
        out = _forked(task, local_ranks, start, stop, on_message, elsewhere)
    if out is None:
        out = _forked(replace(task, share=None), local_ranks, start, stop, on_message, elsewhere)
    if out is None:
        killed = {rank: faults.died(rank, task.attempt, -signal.SIGKILL) for rank in local_ranks}
        return AttemptOutcome(task.attempt, faults=killed)
    return out


def _forked(
    task: AttemptTask,
    ranks: Sequence[int],
    start: Start,
    stop: int | None,
    on_message: OnMessage | None,
    elsewhere: Elsewhere,
) -> AttemptOutcome | None:
    """Forks ``ranks`` from one parent and waits for them; ``None`` if the parent could not fork all."""
    live: dict[int, Child] = {}
    parent = parent_of(task, ranks, start)
    try:
        signum = _fill(live, parent, len(ranks), stop)
        if signum is not None:
            return AttemptOutcome(task.attempt, signum=signum)
        if len(live) < len(ranks):
            return None
        with task.rendezvous.hosted():
            return watch(live, task, stop, on_message, elsewhere)
    finally:  # the ranks of a finished attempt have ended; those of an incomplete start are killed
        for child in live.values():
            child.send_signal(signal.SIGKILL)
        for child in live.values():
            child.reap()
        parent.end()


def _fill(live: dict[int, Child], parent: RankParent, count: int, stop: int | None) -> int | None:
    """Takes ``count`` ranks from their parent, or fewer; returns the signal that arrived meanwhile."""
    ready = select.poll()
    for fd in (parent.fd, stop):
        if fd is not None:
            ready.register(fd, select.POLLIN)
    while len(live) < count:
        if any(fd == stop for fd, _ in ready.poll()):
            assert stop is not None
            return os.read(stop, 1)[0]
        child = parent.take()
        if child is None:
            break
        live[child.rank] = child
    return None
