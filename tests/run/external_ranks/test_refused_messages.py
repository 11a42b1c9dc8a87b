"""A rank that refuses a message without the job's signature ends the ranks that wait for it."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from launcher.errors import RunError
from launcher.job.compose import compose
from launcher.planner.plan_job import plan_job
from launcher.run.external_ranks.follower import _hear, _refusing
from launcher.run.external_ranks.joining import Joining
from launcher.run.external_ranks.leader import FollowerRanks, Instruction, carry_out
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.messages import CAUSE, Messages, Secret, secret
from launcher.runtime.cluster.network import NetworkView
from launcher.runtime.cluster.rendezvous import MessageRefused
from launcher.runtime.cluster.world import no_stop_signal, world_at
from launcher.steps.on_ranks import RankSteps

LIMIT_S = 60.0
SOON_S = 20.0
REFUSED = f"in the store of this job is not signed with its secret: {CAUSE}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    monkeypatch.setenv("LAUNCHER_SECRET", "a")
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))


def place(rank: int, size: int) -> Place:
    return Place(rank, size, rank, size, 0, "127.0.0.1", 1)


def order(folder: Path) -> Instruction:
    job = compose(["recipe=lm_single"]).job
    todo = RankSteps(job, plan_job(job), folder, ("train",), None, None, {})
    return Instruction(todo, folder, "cpu", None, LIMIT_S, 1, polls=True)


@contextmanager
def forked(act: Callable[[], object]) -> Iterator[None]:
    """Runs ``act`` in a forked process, which must fail.

    No thread of the test may run yet: a fork that happens while a thread is in torch keeps the locks of torch.
    """
    pid = os.fork()
    if pid == 0:
        gc.freeze()  # objects that other threads made must not be collected here
        gc.disable()
        try:
            act()
        finally:
            os._exit(3)
    try:
        yield
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def connection(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=LIMIT_S))


def follows(store: TCPStore, rank: int, key: bytes) -> None:
    at = place(rank, 3)
    own = Messages(connection(store), Secret(key)).within("launcher0")
    with _refusing(own, at):
        _hear(own, at, NetworkView(at, {}), lambda: None)


def test_a_rank_that_refuses_its_order_ends_rank_0_and_those_that_join(store: TCPStore, tmp_path: Path) -> None:
    """Rank 1 has another secret; rank 2 has its order and waits for the others to join."""
    at = place(0, 3)
    others, began = FollowerRanks(at, store, NetworkView(at, {})), time.monotonic()
    told: list[str] = []

    def joins() -> None:
        try:
            joining(connection(store), 2).attend(waits)
        except RunError as error:
            told.append(str(error))

    third = threading.Thread(target=joins, daemon=True)
    with (
        forked(lambda: follows(store, 1, b"other")),
        forked(lambda: follows(store, 2, secret(at).key)),
    ):
        third.start()
        with pytest.raises(MessageRefused) as caught:
            others.work(order(tmp_path), lambda _: None)
    third.join(SOON_S)
    text = f"rank 1 has refused a message in the store of this job, which is not signed with its secret: {CAUSE}"
    assert str(caught.value) == text
    assert told == [f"rank 0 has failed to connect: {text}"]
    assert time.monotonic() - began < SOON_S


def test_rank_0_that_ends_waits_for_the_others_alone(store: TCPStore) -> None:
    at = place(0, 3)
    others, began = FollowerRanks(at, store, NetworkView(at, {})), time.monotonic()
    with forked(lambda: follows(store, 1, b"other")), forked(lambda: follows(store, 2, secret(at).key)):
        others.dismiss(1)
    assert store.check(["launcher0/heard0.2"])
    assert time.monotonic() - began < SOON_S


def test_a_rank_that_refuses_an_address_ends_those_that_wait_to_join(store: TCPStore, tmp_path: Path) -> None:
    at = place(1, 2)
    store.set("launcher0/here0", "forged")
    began = time.monotonic()
    with (
        forked(lambda: carry_out(order(tmp_path), world_at(at, "cpu"), at, connection(store), NetworkView(at, {}))),
        pytest.raises(RunError) as caught,
    ):
        joining(store, 0).attend(waits)
    assert str(caught.value) == f"rank 1 has failed to connect: here0 {REFUSED}"
    assert json.loads((tmp_path / "errors/rank1.json").read_text())["message"] == f"here0 {REFUSED}"
    assert time.monotonic() - began < SOON_S


def joining(store: Store, rank: int) -> Joining:
    return Joining(store, "launcher0", NetworkView(place(rank, 3), {}), LIMIT_S, no_stop_signal)


def waits() -> None:
    """Wait as a collective in native code does, which never returns."""
    threading.Event().wait(LIMIT_S)
