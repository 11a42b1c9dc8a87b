"""Leads a run over ranks that torchrun or srun has started: rank 0 decides, the others follow."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from launcher.checkpoint.tensorfile.watched_folder import watched
from launcher.console import tell
from launcher.errors import DONE, FAILED, REFUSED, Problem, RequestError, RunError
from launcher.run.external_ranks.joining import (
    Joining,
    ListensAt,
    Question,
    RankReports,
    Unjoined,
    UnreachablePeers,
    another_connection,
    check_connections,
    listeners,
    lost,
    silent,
)
from launcher.run.external_ranks.shared_folder import SHARED_S, SeesFile, seen, token
from launcher.run.external_ranks.trial_layouts import LAST_WORD_S, ExternalTrial, lead
from launcher.runtime import log
from launcher.runtime.cluster.launch_env import DAMAGED, Place, place
from launcher.runtime.cluster.messages import VARIABLE, Messages, Unsigned, encode, of_several_nodes, secret
from launcher.runtime.cluster.network import NetworkView, network
from launcher.runtime.cluster.rendezvous import SAY_S, MessageRefused, await_ranks, open_store, ranks_text
from launcher.runtime.cluster.world import World, connect, no_stop_signal, world_at
from launcher.runtime.faults import Interrupted, Preempted
from launcher.runtime.processes.hang import error_to_raise
from launcher.runtime.signals import STOPS, heard
from launcher.steps.on_ranks import run_rank_steps
from launcher.steps.sent_to_ranks import RankSteps

PATIENCE_S = 3600.0  # seconds that the others wait while rank 0 plans and runs earlier steps
TELL_S = 0.5  # seconds for a rank that was stopped to inform the others
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Instruction:
    """What rank 0 instructs every other rank to do."""

    todo: RankSteps
    folder: Path
    device: str
    backend: str | None
    timeout_s: float
    threads: int
    polls: bool


Word = SeesFile | ListensAt | UnreachablePeers | ExternalTrial | Instruction | int


class FollowerRanks:
    """Rank 0's messages to the other ranks: trials and questions, then one order or an exit code.

    ``notes``: lines on the network for the start of the run.
    """

    def __init__(self, at: Place, store: Store, network: NetworkView) -> None:
        self.notes: tuple[str, ...] = ()
        self._at = at
        self._store = store
        self._signed = Messages(store, secret(at))
        self._own = self._signed.within(corner(at))
        self._network = network
        self._turn = 0
        self._over = False
        self._met = False
        self._absent: list[int] = []
        self._own.set("here0", whereabouts())

    def folder(self, elastic: bool = False) -> Path | None:
        """Returns the run folder of the previous attempt, if the outer launcher has restarted the ranks.

        ``elastic``: the previous attempt may have had more nodes, and therefore another secret.
        """
        if not self._at.attempt or not self._signed.check(["launcher.folder"]):
            return None
        messages = Messages(self._store, of_several_nodes(self._at)) if elastic else self._signed
        try:
            return Path(self._signed.get("launcher.folder").decode())
        except RunError:
            return Path(messages.get("launcher.folder").decode())

    def went_to(self, folder: Path) -> None:
        """Records the run folder for the next attempt."""
        self._signed.set("launcher.folder", str(folder))

    def gather(self, timeout_s: float) -> None:
        """Waits until every rank has connected with the same versions, and every node reaches every other.

        Raises ``RunError`` if a rank is late or a node cannot reach another, ``RequestError`` if versions
        differ.
        """
        if self._met:
            return
        requirement = "must be started with the same MASTER_ADDR and MASTER_PORT"
        others = range(1, self._at.size)
        self._absent = await_ranks(self._own, "here", others, timeout_s, say=tell, action=requirement)
        if self._absent:
            have = "has" if len(self._absent) == 1 else "have"
            text = (
                f"{ranks_text(self._absent)} of {self._at.size} {have} not connected within {timeout_s:g} s"
            )
            raise RunError(f"{text} (launch.timeout_s); each {requirement}")

        # a rank may have been started for another number of ranks
        for rank in others:
            size = int(self._own.get(f"size{rank}"))
            if size != self._at.size:
                other = f"rank 0 for {self._at.size}"
                text = f"rank {rank} was started for {size} ranks, {other}"
                raise RequestError((Problem("", f"{text}: {DAMAGED}"),))

        self._met = True
        if self._network.several_nodes:
            self._meet()

    def _meet(self) -> None:
        """Compares versions and tries connections between nodes, before ranks need them."""
        others = range(1, self._at.size)
        here = {rank: self._own.get(f"here{rank}").decode() for rank in range(self._at.size)}
        nodes = {rank: text.partition(" ")[0] for rank, text in here.items()}
        texts = {
            rank: self._own.get(f"about{rank}").decode() for rank in others if self._sends_versions(rank)
        }
        every = RankReports({rank: texts.get(rank, "") for rank in others})
        every.same_versions()
        self._network.peers = every.nodes(self._network)
        self._network.nodes = nodes

        peers = listeners(self._ask(ListensAt(every.rendezvous())))
        check_connections(self._ask(UnreachablePeers(peers, nodes)).values(), self._at.host)
        self.notes = (self._network.note(),)

    def _sends_versions(self, rank: int) -> bool:
        """Returns true if a rank sent its versions and interface; older launchers send host and PID."""
        return self._own.check([f"about{rank}"])

    def share(self, root: Path, key: str) -> None:
        """Writes a temporary file at ``root``; raises ``RequestError`` unless all ranks see it."""
        if self._at.size == 1:
            return
        with token(root) as file:
            seen(self._ask(SeesFile(file)), root, key)

    def _ask(self, question: Question) -> dict[int, str]:
        """Returns the answers of all ranks, including rank 0. Raises ``RunError`` if one does not answer."""
        turn = self._turn
        self._tell(question)
        answers = {0: question.answer(self._network)}
        ranks = range(1, self._at.size)
        within_s = SHARED_S + LAST_WORD_S
        late = await_ranks(self._own, f"answer{turn}.", ranks, within_s, say=tell, action=question.doing)
        if late:
            raise silent(late, self._network, within_s)
        return answers | {rank: self._own.get(f"answer{turn}.{rank}").decode() for rank in ranks}

    def try_out(self, trial: ExternalTrial, send: Callable[[object], None]) -> dict[str, Any]:
        """Runs ``trial`` in a child of each rank; more messages may follow, even if it raises.

        Raises ``RanksFailed`` with the root cause.
        """
        turn = self._turn
        self._tell(trial)
        return lead(trial, turn, self._at, self._own, send)

    def work(self, order: Instruction, send: Callable[[object], None]) -> dict[str, Any]:
        """Runs ``order`` on all ranks; returns when the others have left.

        Raises ``RanksFailed`` with the root cause.
        """
        self.went_to(order.folder)
        self._over = True
        try:
            self._tell(order)
        except RunError as error:  # the ranks that have received the order wait for the others
            joining = Joining(self._store, corner(self._at), self._network, order.timeout_s, no_stop_signal)
            joining.tell(str(error))
            raise

        # a stopped rank also waits until the others have left, as it may host their store
        stop: Preempted | None = None
        done: dict[str, Any] = {}
        try:
            world = replace(world_at(self._at), send=send)
            done = carry_out(order, world, self._at, self._store, self._network)
        except Preempted as error:
            stop = error
        self._wait("left", TELL_S if isinstance(stop, Unjoined) else LAST_WORD_S, ending=True)
        if stop is not None:
            raise stop
        return done

    def hurry(self) -> None:
        """Stops waiting for ranks that have not arrived yet."""
        self._absent = [rank for rank in range(1, self._at.size) if not self._own.check([f"here{rank}"])]

    def dismiss(self, code: int) -> None:
        """Sends the others an exit code, unless they have received their order."""
        if not self._over and self._at.size > 1:
            self._over = True
            self._tell(code)

    def _tell(self, word: Question | ExternalTrial | Instruction | int) -> None:
        self._own.set(f"word{self._turn}", encode(word, Word))
        late = self._wait(f"heard{self._turn}.", ending=isinstance(word, int))
        self._turn += 1
        if late and not isinstance(word, int):
            raise silent(late, self._network, LAST_WORD_S)

    def _wait(self, key: str, within_s: float = LAST_WORD_S, ending: bool = False) -> list[int]:
        """Waits for every other rank, as rank 0 may host their store; returns the ranks that are late.

        Raises ``MessageRefused`` if a rank has refused a message; if the job is ``ending``, ignores the rank.
        """
        while True:
            try:
                return self._await(key, within_s)
            except MessageRefused as error:
                if not ending:
                    raise
                self._absent.append(error.rank)

    def _await(self, key: str, within_s: float) -> list[int]:
        ranks = [rank for rank in range(1, self._at.size) if rank not in self._absent]
        complaint = "have not answered rank 0"
        first_s = min(SAY_S, within_s)
        late = await_ranks(self._own, key, ranks, first_s, say=tell, action=complaint)
        if late and within_s > first_s and not lost(late, self._network):
            late = await_ranks(self._own, key, late, within_s - first_s, say=tell, action=complaint)
        if late:  # the outer launcher handles late ranks
            _log.warning("%s: no answer within %.0f s", ranks_text(late), within_s)
            self._absent += late
        try:
            for rank in sorted({*ranks} - {*late}):
                self._own.get(f"{key}{rank}")
        except RunError as error:  # only logged: the end of the run has been reported
            _log.warning("%s", error)
        return late


@contextmanager
def leading(at: Place | None = None) -> Iterator[FollowerRanks]:
    """Yields the other ranks; however the block ends, none of them is left waiting."""
    at = at or outer_place()
    job_secret = secret(at)
    if job_secret.derived and at.size > 1:
        text = f"messages between ranks are signed with a key that others can derive: {job_secret.why}"
        _log.info("%s; set %s to the same secret for all ranks", text, VARIABLE)
    with network(at) as used:
        others = FollowerRanks(at, open_store(at, lambda: PATIENCE_S, tell, where=used.here()), used)

        # the exit code for the others, whatever ends the block
        code = FAILED
        try:
            yield others
            code = DONE
        except RequestError:
            code = REFUSED
            raise

        except Interrupted as stop:
            code = stop.code
            others.hurry()
            raise
        finally:
            others.dismiss(code)


def whereabouts() -> str:
    return f"{socket.gethostname()} {os.getpid()}"


def outer_place() -> Place:
    """Returns this process's place under an outer launcher. Raises ``RequestError`` without one."""
    at = place()
    if at is None:
        text = "external: neither torchrun nor srun has started this process"
        text += "; start this command with torchrun, or set launch.mode=auto, which starts the ranks itself"
        raise RequestError((Problem("launch.mode", text),))
    return at


def carry_out(order: Instruction, world: World, at: Place, store: Store, used: NetworkView) -> dict[str, Any]:
    """Runs one rank's part. A failure is written to ``errors/rank<N>.json`` before it is raised."""
    with watched(order.folder):
        return _carry_out(order, world, at, store, used)


def _carry_out(
    order: Instruction, world: World, at: Place, store: Store, used: NetworkView
) -> dict[str, Any]:
    mine = replace(world_at(at, order.device, order.backend), send=world.send)
    own = Messages(store, secret(at)).within(corner(at))

    # A store may be too busy, or gone, when an address is needed. So rank 0, which reports on all ranks,
    # reads all addresses before it joins; the others read that of rank 0, whose end may end the store.
    early = at.size if at.rank == 0 else 1
    known: dict[int, str] = {}

    def where(rank: int) -> str:
        if rank in known:
            return known[rank]
        try:
            return own.get(f"here{rank}").decode() if own.check([f"here{rank}"]) else ""
        except RuntimeError:
            return ""

    def fault(error: BaseException) -> BaseException:
        return error_to_raise(
            error, mine, order.folder, where=where, timeout_s=order.timeout_s, network=used, skip=__file__
        )

    log.configure(mine.rank, order.folder)
    faulthandler.enable(file=2)

    # an error is recorded before this rank leaves the group, where others wait for it
    with _stop_requests(order, mine) as stop_signal, ExitStack() as group:
        try:
            joining = Joining(store, f"launcher{at.attempt}", used, order.timeout_s, stop_signal)
            try:
                known |= {rank: own.get(f"here{rank}").decode() for rank in range(early)}
            except Unsigned as error:  # the others wait for this rank to join
                joining.tell(str(error))
                raise
            group.enter_context(
                connect(
                    mine,
                    another_connection(store),
                    order.timeout_s,
                    order.threads,
                    order.folder,
                    joining.attend,
                )
            )
            return run_rank_steps(replace(mine, stop_signal=stop_signal), order.todo)
        except Preempted:
            raise
        except BaseException as error:
            try:
                raise fault(error) from error
            except Interrupted:  # a signal that arrived before ``deafen``; no other can follow
                raise fault(error) from error


@contextmanager
def _stop_requests(order: Instruction, world: World) -> Iterator[Callable[[], int]]:
    """Yields a function that returns a stop signal; without polling the signal ends the rank."""
    if order.polls:
        with heard(forced=True) as stop_signal:
            yield stop_signal
        return
    if world.rank:  # Python's handlers wait until a collective returns
        for signum in STOPS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
    yield no_stop_signal


def corner(at: Place) -> str:
    """Returns the key prefix of this attempt."""
    return f"launcher{at.attempt}"
