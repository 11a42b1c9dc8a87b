"""Tries a layout in a child of each rank of an outer launcher, so that the ranks survive a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.console import tell
from launcher.errors import RunError
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.messages import Messages, decode, encode
from launcher.runtime.cluster.rendezvous import await_ranks, ranks_text
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import Fault, Interrupted, Preempted, failed, hung, raised, signal_name, silent
from launcher.runtime.processes.start_and_restart import run_outer_rank
from launcher.runtime.run_folder import scratch
from launcher.steps.on_ranks import run_rank_steps
from launcher.steps.sent_to_ranks import RankSteps

LAST_WORD_S = 60.0  # seconds that rank 0 waits until a rank that hangs has ended its child


@dataclass(frozen=True)
class ExternalTrial:
    """The work of every rank's child; each has a temporary folder."""

    todo: RankSteps
    device: str
    backend: str | None
    timeout_s: float
    threads: int


@dataclass(frozen=True)
class Ended:
    """How a rank's child ended: with neither a fault nor a result if another rank failed.

    ``signum``: the signal that stopped its parent; ``insisted``: the signal came twice.
    """

    fault: Fault | None = None
    result: Any = None
    signum: int = 0
    insisted: bool = False


def lead(
    trial: ExternalTrial, turn: int, at: Place, own: Messages, send: Callable[[object], None]
) -> dict[str, Any]:
    """Runs rank 0's part; returns its results once every child has ended successfully.

    Raises ``RanksFailed`` with the root cause, ``Interrupted`` if a rank was asked to stop, ``RunError`` if a
    rank does not answer any more: then no other trial is possible.
    """
    keys = _keys(turn, own)
    try:
        mine = _child(trial, turn, at, keys, send)
        if mine.signum:
            raise Interrupted(mine.signum, mine.insisted)
        ended = [mine, *_others(trial, at, keys)]
    except BaseException as error:  # when this rank's part ends, the other ranks' parts must end too
        _tell(keys, silent(at.rank, at.attempt, type(error).__name__, "has given up"))
        raise

    stop = next((one.signum for one in ended if one.signum), 0)
    if stop:
        raise Interrupted(stop)
    faults = [one.fault for one in ended if one.fault is not None]
    if faults:
        raise failed(faults)
    result: dict[str, Any] = mine.result
    return result


def obey(trial: ExternalTrial, turn: int, at: Place, own: Messages) -> None:
    """Runs the part of another rank, and reports to rank 0. Raises ``Preempted`` if it was asked to stop."""
    keys = _keys(turn, own)
    mine = _child(trial, turn, at, keys, lambda _: None)
    keys.set(f"ended{at.rank}", encode(mine, Ended))
    if mine.signum:
        raise Preempted(mine.signum)


def _child(
    trial: ExternalTrial, turn: int, at: Place, keys: Messages, send: Callable[[object], None]
) -> Ended:
    """Runs this rank's child. All other ranks know of a failure when this returns."""
    try:
        with scratch() as folder:
            out = run_outer_rank(
                partial(_in_folder, trial.todo, folder),
                at,
                f"trial{at.attempt}.{turn}",
                folder=folder,
                device=trial.device,
                backend=trial.backend,
                timeout_s=trial.timeout_s,
                threads=trial.threads,
                on_message=lambda _, news: send(news),
                elsewhere=partial(_reported_fault, keys),
            )
    except Exception as error:  # the child could not be started or supervised
        ended = Ended(raised(at.rank, at.attempt, error, skip=__file__))
    else:
        fault, result = out.faults.get(at.rank), out.results.get(at.rank)
        ended = Ended(fault, result if at.rank == 0 else None, out.signum or 0, out.insisted)
    if ended.signum:
        text = f"was stopped by {signal_name(ended.signum)}"
        _tell(keys, silent(at.rank, at.attempt, "stopped", text))
    elif ended.fault is not None:
        _tell(keys, ended.fault)
    return ended


def _in_folder(todo: RankSteps, folder: Path, world: World) -> dict[str, Any]:
    """Uses this rank's folder, as that of rank 0 is on another machine."""
    return run_rank_steps(world, replace(todo, folder=folder))


def _others(trial: ExternalTrial, at: Place, keys: Messages) -> Iterator[Ended]:
    """Yields how the other ranks' children ended; ends a child that outlasts the others by too long."""
    ranks = range(1, at.size)
    late = await_ranks(
        keys, "ended", ranks, trial.timeout_s, say=tell, action="did not finish this layout yet"
    )
    if late:
        fault = hung(late[0], at.attempt, trial.timeout_s, "it has not ended, the others have")
        _tell(keys, fault)
        yield Ended(fault)
        late = await_ranks(keys, "ended", late, LAST_WORD_S, say=tell, action="should end now")
    if late:
        raise RunError(
            f"{ranks_text(late)}: no answer within {LAST_WORD_S:g} s: dead, or cut off from the network"
        )
    for rank in ranks:
        one: Ended = decode(keys.get(f"ended{rank}"), Ended)
        yield one


def _tell(keys: Messages, fault: Fault) -> None:
    keys.set("failed", encode(fault, Fault))


def _reported_fault(keys: Messages) -> Fault | None:
    """Returns the fault that a rank has reported; ``None`` if no rank has failed."""
    if not keys.check(["failed"]):
        return None
    fault: Fault = decode(keys.get("failed"), Fault)
    return fault


def _keys(turn: int, own: Messages) -> Messages:
    return own.within(f"trial{turn}")
