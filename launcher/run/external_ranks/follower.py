"""The ranks of an outer launcher except rank 0: they follow the instructions of rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from launcher.console import tell
from launcher.errors import DONE, FAILED, RunError, printable
from launcher.run.external_ranks.joining import Question, about
from launcher.run.external_ranks.leader import (
    PATIENCE_S,
    TELL_S,
    Instruction,
    Word,
    carry_out,
    corner,
    outer_place,
    whereabouts,
)
from launcher.run.external_ranks.trial_layouts import ExternalTrial, obey
from launcher.runtime import gc_thresholds
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.messages import Messages, Unsigned, decode, interruptible, secret
from launcher.runtime.cluster.network import NetworkView, endpoint, network
from launcher.runtime.cluster.rendezvous import SAY_S, RendezvousRequest, Seconds, open_store
from launcher.runtime.cluster.world import world_at
from launcher.runtime.faults import Interrupted, Preempted, RanksFailed
from launcher.runtime.signals import heard


def follow(timeout_s: Seconds) -> int:
    """Follows rank 0's instructions on any other rank; returns the exit code.

    Rank 0 reports failures, which are also in ``errors/``. ``timeout_s`` returns how long rank 0 may take to
    arrive; it is called only if rank 0 is late.
    """
    at = outer_place()
    try:
        with heard() as stop_signal, network(at) as used:

            def look() -> None:
                if stop_signal():
                    raise Preempted(stop_signal())

            with _answered(at, used):
                store = open_store(at, timeout_s, tell, look, where=used.here())
                used.use()
                own = Messages(store, secret(at)).within(corner(at))
                own.set(f"size{at.rank}", str(at.size))
                own.set(f"about{at.rank}", about(used))
                own.set(f"here{at.rank}", whereabouts())
                with _refusing(own, at):
                    word = _hear(own, at, used, look)
            code = word if isinstance(word, int) else _obey(word, at, store, used)
            if not isinstance(word, int) and code != FAILED:
                own.set(f"left{at.rank}", "")
            return code
    except Interrupted as stop:
        return stop.code


@contextmanager
def _answered(at: Place, used: NetworkView) -> Iterator[None]:
    """Explains errors of the store: its host, rank 0 or the outer launcher, has ended or is unreachable."""
    try:
        yield
    except (DistError, TimeoutError) as error:
        where = endpoint(at.host, at.port)
        if why := used.lost():
            text = f"rank {at.rank}: {used.here()} no longer reaches {where} ({why})"
            raise RunError(f"{text}; the cause is the network between them, or the other node") from error
        why = str(error).splitlines()[0]
        raise RunError(f"rank {at.rank}: rank 0, or its launcher, has ended: {why}") from error


@contextmanager
def _refusing(own: Messages, at: Place) -> Iterator[None]:
    """Informs the ranks that wait for this one if it refuses a message, then raises ``RunError``."""
    try:
        yield
    except Unsigned as error:
        with suppress(TimeoutError, DistError):  # rank 0 has ended already
            interruptible(lambda: own.refuse(at.rank), within_s=TELL_S)
        raise RunError(f"rank {at.rank}: {error}") from error


def _hear(own: Messages, at: Place, used: NetworkView, look: Callable[[], None]) -> Instruction | int:
    """Runs trials and answers questions of rank 0 until its last message, which is returned."""
    for turn in count():
        word = _word(own, at, turn, used, look)
        if isinstance(word, ExternalTrial):
            with _acknowledging_stop(own, at, turn + 1):
                obey(word, turn, at, own)
            continue
        if not isinstance(word, Question):
            return word
        own.set(f"answer{turn}.{at.rank}", interruptible(partial(word.answer, used), look))
    raise AssertionError("counting ended")


def _word(own: Messages, at: Place, turn: int, used: NetworkView, look: Callable[[], None]) -> Word:
    """Returns the next message of rank 0."""
    request = RendezvousRequest(own, f"word{turn}")

    def watch() -> None:
        look()
        if request.late_s() > SAY_S and used.lost():
            raise TimeoutError(f"the store has not answered for {SAY_S:g} s")

    with _acknowledging_stop(own, at, turn), request:
        if not interruptible(partial(request.wait, PATIENCE_S), watch):
            raise RunError(f"rank {at.rank}: rank 0 has not answered for {PATIENCE_S:.0f} s")

    word: Word = decode(own.get(f"word{turn}"), Word)
    own.set(f"heard{turn}.{at.rank}", "")
    return word


@contextmanager
def _acknowledging_stop(own: Messages, at: Place, turn: int) -> Iterator[None]:
    """Acknowledges the message of ``turn`` if this rank is stopped, so that rank 0 need not wait for it."""
    try:
        yield
    except Interrupted:
        with suppress(TimeoutError, DistError):  # without the network rank 0 cannot be informed
            interruptible(lambda: own.set(f"heard{turn}.{at.rank}", ""), within_s=TELL_S)
        raise


def _obey(order: Instruction, at: Place, store: Store, used: NetworkView) -> int:
    gc_thresholds.as_usual()
    console = os.dup(2)  # this rank's output goes to its log from now on

    try:
        carry_out(order, world_at(at), at, store, used)
    except Interrupted as stop:
        return stop.code
    except RanksFailed as error:  # rank 0 cannot report it
        message = printable(f"error: {error}", "\n\t")
        os.write(console, f"{message}\n".encode())
        return FAILED
    except BaseException:
        return FAILED
    return DONE
