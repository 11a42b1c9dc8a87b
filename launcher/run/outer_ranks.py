"""One run over ranks that torchrun or srun has started: rank 0 decides, the others do as it says."""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from launcher.console import tell
from launcher.errors import DONE, FAILED, REFUSED, Problem, RequestError, RunError, printable
from launcher.run.outer_trial import LAST_WORD_S, Trial, lead, obey
from launcher.runtime import gc_thresholds, log
from launcher.runtime.cluster.launch_env import DAMAGED, Place, place
from launcher.runtime.cluster.outer_rendezvous import Seconds, await_ranks, open_store, ranks_text
from launcher.runtime.cluster.world import World, among, connect, never
from launcher.runtime.faults import Interrupted, Preempted, RanksFailed
from launcher.runtime.preemption import STOPS, heard
from launcher.runtime.processes.blame import failed

PATIENCE_S = 3600.0  # of the others, while rank 0 plans and does the steps before theirs
SHARED_S = 8.0  # until a file that one node has written is seen by the others
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """What rank 0 tells every other to do."""

    work: Callable[[World], dict[str, Any]]
    folder: Path
    device: str
    backend: str | None
    timeout_s: float
    threads: int
    polls: bool


@dataclass(frozen=True)
class Look:
    """Rank 0 asks every other whether it sees this file."""

    token: Path


class Others:
    """Rank 0's word to the other ranks: first ``Trial``s and ``Look``s, then one order, or an exit code."""

    def __init__(self, at: Place, whole: Store) -> None:
        self._at = at
        self._whole = whole
        self._own = _corner(whole, at)
        self._turn = 0
        self._over = False
        self._absent: list[int] = []
        self._own.set("here0", _whereabouts())

    def folder(self) -> Path | None:
        """Where the attempt before this one was at work, if the outer launcher has restarted us."""
        if not self._at.attempt or not self._whole.check(["launcher.folder"]):
            return None
        return Path(self._whole.get("launcher.folder").decode())

    def went_to(self, folder: Path) -> None:
        """What ``folder`` tells the next attempt."""
        self._whole.set("launcher.folder", str(folder))

    def gather(self, timeout_s: float) -> None:
        """Until every rank is here. Raises ``RunError`` when one has not come in time."""
        what = "must be started with the same MASTER_ADDR and MASTER_PORT"
        others = range(1, self._at.size)
        self._absent = await_ranks(self._own, "here", others, timeout_s, say=tell, what=what)
        if self._absent:
            have = "has" if len(self._absent) == 1 else "have"
            text = f"{ranks_text(self._absent)} of {self._at.size} {have} not come within {timeout_s:g} s"
            raise RunError(f"{text} (launch.timeout_s); each {what}")

        # they may have been told another number of ranks
        for rank in others:
            size = int(self._own.get(f"size{rank}"))
            if size != self._at.size:
                other = f"rank 0 that there are {self._at.size}"
                text = f"rank {rank} was told that there are {size} ranks, {other}"
                raise RequestError((Problem("", f"{text}: {DAMAGED}"),))

    def share(self, root: Path, key: str) -> None:
        """Raises ``RequestError`` unless all ranks see what rank 0 writes at ``root``; leaves nothing."""
        if self._at.size == 1:
            return
        with _token(root) as token:
            self._tell(Look(token))
            asked, seen = range(1, self._at.size), f"seen{self._turn - 1}."
            what = f"must look for {token}"
            late = await_ranks(self._own, seen, asked, SHARED_S + LAST_WORD_S, say=tell, what=what)
            answers = {rank: self._own.get(f"{seen}{rank}").decode() for rank in asked if rank not in late}

        # a rank that does not see it says where it is
        blind = {rank: host for rank, host in answers.items() if host}
        if blind:
            hosts = ", ".join(dict.fromkeys(blind.values()))
            here = socket.gethostname()
            text = (
                f"{ranks_text(sorted(blind))} (on {hosts}) cannot see what rank 0 (on {here}) has written "
                "there; all ranks need one folder on a shared file system, by the same path"
            )
            raise RequestError((Problem(key, f"{root}: {text}"),))

    def try_out(self, trial: Trial, send: Callable[[object], None]) -> dict[str, Any]:
        """All ranks do ``trial`` in a child each; when this returns or raises there can be more to do.

        Raises ``RanksFailed`` with the root cause.
        """
        turn = self._turn
        self._tell(trial)
        return lead(trial, turn, self._at, self._own, send)

    def work(self, order: Order, send: Callable[[object], None]) -> dict[str, Any]:
        """All ranks do ``order``; returns when the others have left.

        Raises ``RanksFailed`` with the root cause.
        """
        self.went_to(order.folder)
        self._over = True
        self._tell(order)

        # one that was stopped waits too until the others have left: their store may be here
        stop: Preempted | None = None
        done: dict[str, Any] = {}
        try:
            done = carry_out(order, replace(among(self._at), send=send), self._at, self._whole)
        except Preempted as error:
            stop = error
        self._wait("left")
        if stop is not None:
            raise stop
        return done

    def hurry(self) -> None:
        """Wait for nobody who has not come yet."""
        self._absent = [rank for rank in range(1, self._at.size) if not self._own.check([f"here{rank}"])]

    def dismiss(self, code: int) -> None:
        """Let the others go, unless they have had their order."""
        if not self._over and self._at.size > 1:
            self._over = True
            self._tell(code)

    def _tell(self, word: Look | Trial | Order | int) -> None:
        self._own.set(f"word{self._turn}", pickle.dumps(word))  # type: ignore[arg-type]
        self._wait(f"heard{self._turn}.")
        self._turn += 1

    def _wait(self, what: str) -> None:
        """Until every other rank has; a store that rank 0 hosts must not end before."""
        ranks = [rank for rank in range(1, self._at.size) if rank not in self._absent]
        asked = "have not answered rank 0"
        late = await_ranks(self._own, what, ranks, LAST_WORD_S, say=tell, what=asked)
        if late:  # their launcher sees to them
            _log.warning("%s: not heard of within %.0f s", ranks_text(late), LAST_WORD_S)


@contextmanager
def leading(at: Place | None = None) -> Iterator[Others]:
    """Whatever becomes of the block, no other rank is left waiting."""
    at = at or here()
    others = Others(at, open_store(at, lambda: PATIENCE_S, tell))

    # what the others are told at the end, whatever ends it
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


def follow(timeout_s: Seconds) -> int:
    """Any rank but 0: do what rank 0 says; returns the exit code.

    A failure is told by rank 0, and in ``errors/``. ``timeout_s``: how long rank 0 may take to come; it is
    asked when that takes long.
    """
    at = here()
    try:
        with heard() as told:

            def look() -> None:
                if told():
                    raise Preempted(told())

            with _answered(at):
                whole = open_store(at, timeout_s, tell, look)
                own = _corner(whole, at)
                own.set(f"size{at.rank}", str(at.size))
                own.set(f"here{at.rank}", _whereabouts())
                word = _hear(own, at, look)
            code = word if isinstance(word, int) else _obey(word, at, whole)
            if not isinstance(word, int) and code != FAILED:
                own.set(f"left{at.rank}", "")
            return code
    except Interrupted as stop:
        return stop.code


@contextmanager
def _answered(at: Place) -> Iterator[None]:
    """Who hosts the store must live until it has said its last word: rank 0, or its outer launcher."""
    try:
        yield
    except DistError as error:
        why = str(error).splitlines()[0]
        raise RunError(f"rank {at.rank}: rank 0, or what has started it, has ended: {why}") from error


def _hear(own: Store, at: Place, look: Callable[[], None]) -> Order | int:
    """Rank 0's last word; tries layouts, and tells whether files are to be seen, as often as it asks."""
    for turn in count():
        word = _word(own, at, turn, look)
        if isinstance(word, Trial):
            with _left(own, at, turn + 1):
                obey(word, turn, at, own)
            continue
        if not isinstance(word, Look):
            return word
        blind = "" if _seen(word.token) else socket.gethostname()
        own.set(f"seen{turn}.{at.rank}", blind)
    raise AssertionError("counting ended")


def _word(own: Store, at: Place, turn: int, look: Callable[[], None]) -> Look | Trial | Order | int:
    """What rank 0 says next."""
    end = time.monotonic() + PATIENCE_S
    with _left(own, at, turn):
        while not own.check([f"word{turn}"]):
            look()
            if time.monotonic() > end:
                raise RunError(f"rank {at.rank}: rank 0 has said nothing for {PATIENCE_S:.0f} s")
            time.sleep(0.05)

    word: Look | Trial | Order | int = pickle.loads(own.get(f"word{turn}"))
    own.set(f"heard{turn}.{at.rank}", "")
    return word


@contextmanager
def _left(own: Store, at: Place, turn: int) -> Iterator[None]:
    """A rank that is asked to stop will not hear the word of ``turn``: rank 0 need not wait for that."""
    try:
        yield
    except Interrupted:
        own.set(f"heard{turn}.{at.rank}", "")
        raise


def _obey(order: Order, at: Place, whole: Store) -> int:
    gc_thresholds.as_usual()
    console = os.dup(2)  # what this rank says goes to its log from now on

    try:
        carry_out(order, among(at), at, whole)
    except Interrupted as stop:
        return stop.code
    except RanksFailed as error:  # rank 0 is in no state to tell it
        said = printable(f"error: {error}", "\n\t")
        os.write(console, f"{said}\n".encode())
        return FAILED
    except BaseException:
        return FAILED
    return DONE


def _seen(token: Path) -> bool:
    end = time.monotonic() + SHARED_S
    while not token.is_file():
        if time.monotonic() > end:
            return False
        with suppress(OSError):
            os.listdir(token.parent)  # makes a network file system look again
        time.sleep(0.1)
    return True


@contextmanager
def _token(root: Path) -> Iterator[Path]:
    """A file at ``root`` that nobody else has written; folders that are made for it go with it."""
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    token = root / f".shared-{secrets.token_hex(8)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        token.touch()
        yield token
    finally:
        token.unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):  # somebody has put something there
                folder.rmdir()


def _whereabouts() -> str:
    return f"{socket.gethostname()} {os.getpid()}"


def here() -> Place:
    """This process among those of the outer launcher. Raises ``RequestError`` where there is none."""
    at = place()
    if at is None:
        raise RequestError((Problem("launch.mode", "neither torchrun nor srun has started this process"),))
    return at


def carry_out(order: Order, world: World, at: Place, whole: Store) -> dict[str, Any]:
    """One rank's part. A failure is in ``errors/rank<N>.json`` before it is raised."""
    mine = replace(among(at, order.device, order.backend), send=world.send)
    own = _corner(whole, at)

    # A store may be too busy, or gone, when it is needed: rank 0, which tells of all, asks it at the start,
    # and the others ask it for rank 0, which may take it along.
    early = at.size if at.rank == 0 else 1
    known = {rank: own.get(f"here{rank}").decode() for rank in range(early)}

    def where(rank: int) -> str:
        if rank in known:
            return known[rank]
        try:
            return own.get(f"here{rank}").decode() if own.check([f"here{rank}"]) else ""
        except RuntimeError:
            return ""

    def fault(error: BaseException) -> BaseException:
        return failed(error, mine, folder=order.folder, where=where, timeout_s=order.timeout_s, skip=__file__)

    log.configure(mine.rank, order.folder)
    faulthandler.enable(file=2)

    # an error is put down before it leaves the group, where others wait for this rank
    with _told(order, mine) as told, ExitStack() as group:
        try:
            group.enter_context(connect(mine, whole, order.timeout_s, order.threads, folder=order.folder))
            return order.work(replace(mine, told=told))
        except Preempted:
            raise
        except BaseException as error:
            try:
                raise fault(error) from error
            except Interrupted:  # a signal from before we were deaf; it comes once
                raise fault(error) from error


@contextmanager
def _told(order: Order, world: World) -> Iterator[Callable[[], int]]:
    """What the work asks: has this rank been asked to stop? One that does not poll is ended by the signal."""
    if order.polls:
        with heard(forced=True) as told:
            yield told
        return
    if world.rank:  # Python's handlers wait until a collective returns
        for signum in STOPS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
    yield never


def _corner(store: Store, at: Place) -> Store:
    """Keys of this attempt only."""
    return PrefixStore(f"launcher{at.attempt}", store)
