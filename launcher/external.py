"""One run over ranks that torchrun or srun has started: rank 0 decides, the others do as it says."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from launcher.errors import Problem, RequestError
from launcher.runtime import faults, log
from launcher.runtime.stops import deafen
from launcher.runtime.supervise import STOPS
from launcher.runtime.world import World, connect, outer, outer_store

DONE, FAILED, REFUSED = 0, 1, 2
PATIENCE_S = 3600.0  # of the others, while rank 0 plans and does the steps before theirs
LAST_WORD_S = 60.0  # of rank 0, until every other has heard it
CAUSE_S = 2.0  # until the rank that failed first has written why
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


class Others:
    """Rank 0's word to the other ranks: one order, or an exit code."""

    def __init__(self) -> None:
        self._world = here()
        self._told = False
        self._open: tuple[Store, Store] | None = None

    def folder(self) -> Path | None:
        """Where the attempt before this one was at work, if the outer launcher has restarted us."""
        if not self._world.attempt:
            return None
        whole, _ = self._stores()
        return Path(whole.get("launcher.folder").decode()) if whole.check(["launcher.folder"]) else None

    def work(self, order: Order, send: Callable[[object], None]) -> dict[str, Any]:
        """All ranks do ``order``; returns when the others have left. Raises ``RanksFailed`` with the root cause."""
        whole, own = self._stores()
        whole.set("launcher.folder", str(order.folder))
        self._tell(order)
        done = carry_out(order, replace(self._world, send=send), whole)
        _wait(own, "left", self._world.size)
        return done

    def dismiss(self, code: int) -> None:
        """Let the others go, unless they have had their order."""
        if not self._told and self._world.size > 1:
            self._tell(code)

    def _tell(self, word: Order | int) -> None:
        self._told = True
        _, own = self._stores()
        own.set("word", pickle.dumps(word))  # type: ignore[arg-type]
        _wait(own, "heard", self._world.size)

    def _stores(self) -> tuple[Store, Store]:
        """The outer launcher's store, and our corner of it."""
        if self._open is None:
            whole = outer_store(self._world, PATIENCE_S)
            self._open = whole, _corner(whole, self._world)
        return self._open


@contextmanager
def leading() -> Iterator[Others]:
    """Whatever becomes of the block, no other rank is left waiting."""
    others = Others()
    code = FAILED
    try:
        yield others
        code = DONE
    except RequestError:
        code = REFUSED
        raise
    finally:
        others.dismiss(code)


def follow() -> int:
    """Any rank but 0: do what rank 0 says; returns the exit code. A failure is told by rank 0, and in ``errors/``."""
    world = here()
    whole = outer_store(world, PATIENCE_S)
    own = _corner(whole, world)
    word = pickle.loads(own.get("word"))
    _count(own, "heard", world.size)
    if isinstance(word, int):
        return word
    for signum in STOPS:
        signal.signal(signum, signal.SIG_DFL)  # Python's handlers wait until a collective returns
    try:
        carry_out(word, world, whole)
    except BaseException:
        return FAILED
    _count(own, "left", world.size)
    return DONE


def here() -> World:
    """This process among those of the outer launcher. Raises ``RequestError`` when half of what it says is missing."""
    world = outer()
    if world is None:
        text = "RANK and WORLD_SIZE are set, but LOCAL_RANK, MASTER_ADDR or MASTER_PORT is not: who has started this?"
        raise RequestError((Problem("launch.mode", text, "torchrun --nproc-per-node N -m launcher ..."),))
    return world


def carry_out(order: Order, world: World, store: Store) -> dict[str, Any]:
    """One rank's part. A failure is in ``errors/rank<N>.json`` before it is raised."""
    place = outer(order.device, order.backend)
    assert place is not None
    log.configure(world.rank, order.folder)
    faulthandler.enable(file=2)
    with connect(replace(place, send=world.send), store, order.timeout_s, order.threads):
        try:
            return order.work(replace(place, send=world.send))
        except BaseException as error:
            try:
                raise _told(error, world, order.folder) from error
            except faults.Interrupted:  # a signal from before we were deaf; it comes once
                raise _told(error, world, order.folder) from error


def _told(error: BaseException, world: World, folder: Path) -> BaseException:
    """Write down the failure; on rank 0 the error to raise is that of the rank that failed first."""
    deafen()  # for good: the outer launcher ends us for what we tell now
    own = None if isinstance(error, faults.Interrupted) else faults.raised(world.rank, world.attempt, error, __file__)
    if own is not None:
        faults.write(own, folder)
        _tell_torchrun(error)
    if world.rank:
        return error
    found = _written(folder, world.attempt, patient=own is not None and own.echo)
    return faults.failed(found, folder=folder) if found else error


def _written(folder: Path, attempt: int, patient: bool) -> list[faults.Fault]:
    """What the ranks of this attempt have written; a rank that has only lost its peer waits for that one to tell."""
    end = time.monotonic() + CAUSE_S
    while True:
        read = [faults.Fault(**json.loads(f.read_text(encoding="utf-8"))) for f in folder.glob("errors/rank*.json")]
        found = [f for f in read if f.attempt == attempt]
        if not patient or any(not f.echo for f in found) or time.monotonic() > end:
            return found
        time.sleep(0.05)


def _tell_torchrun(error: BaseException) -> None:
    """Its own report then has the traceback too."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _corner(store: Store, world: World) -> Store:
    """Keys of this attempt only."""
    return PrefixStore(f"launcher{world.attempt}", store)


def _count(store: Store, what: str, size: int) -> None:
    if store.add(what, 1) == size - 1:
        store.set(f"all {what}", "")


def _wait(store: Store, what: str, size: int) -> None:
    """Until every other rank has ``_count``-ed; a store that rank 0 hosts must not end before."""
    if size == 1:
        return
    try:
        store.wait([f"all {what}"], timedelta(seconds=LAST_WORD_S))
    except RuntimeError as error:  # the outer launcher sees to them
        _log.warning("not every rank has %s rank 0 within %.0f s: %s", what, LAST_WORD_S, error)
