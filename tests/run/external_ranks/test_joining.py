"""Ranks that join: a rank that fails or is stopped ends the others at once, whatever they wait for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from launcher.errors import RunError
from launcher.run.external_ranks.joining import Joining, Unjoined
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.messages import interruptible
from launcher.runtime.cluster.network import NetworkView
from launcher.runtime.cluster.world import no_stop_signal
from launcher.runtime.faults import raised

LIMIT_S = 60.0


@pytest.fixture
def store() -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))


def joining(
    store: Store, rank: int, stop_signal: Callable[[], int] = no_stop_signal, timeout_s: float = LIMIT_S
) -> Joining:
    at = Place(rank=rank, size=2, local_rank=0, local_size=1, attempt=0, host="127.0.0.1", port=1)
    return Joining(store, "launcher0", NetworkView(at, {}), timeout_s, stop_signal)


def waits() -> None:
    """Wait as a collective in native code does, which never returns."""
    threading.Event().wait(LIMIT_S)


def elsewhere(act: Callable[[], None]) -> list[BaseException]:
    """Run ``act`` a little later in another thread, as another rank would; return what it raises."""
    errors: list[BaseException] = []

    def work() -> None:
        time.sleep(0.3)
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threading.Thread(target=work, daemon=True).start()
    return errors


def test_a_rank_that_joins_gets_the_callback(store: Store) -> None:
    joined: list[int] = []
    joining(store, 0).attend(lambda: joined.append(0))
    assert joined == [0]


def test_a_rank_that_fails_ends_those_that_wait_and_is_the_cause(store: Store) -> None:
    def fails() -> None:
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] timed out connecting\nmore")

    errors = elsewhere(lambda: joining(store, 1).attend(fails))
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        joining(store, 0).attend(waits)
    assert time.monotonic() - began < LIMIT_S / 2
    why = "cannot connect to the other ranks: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting"
    [first] = errors
    assert f"{why}; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface" in str(first)
    assert "\n" not in str(first)
    assert str(caught.value) == f"rank 1 has failed to connect: {first}"
    assert raised(0, 0, caught.value).echo


def test_a_rank_that_is_asked_to_stop_ends_those_that_wait(store: Store) -> None:
    errors = elsewhere(lambda: joining(store, 1, stop_signal=lambda: signal.SIGTERM).attend(waits))
    with pytest.raises(Unjoined) as caught:
        joining(store, 0).attend(waits)
    assert caught.value.code == 75
    assert [type(error) for error in errors] == [Unjoined]


def test_the_timeout_is_that_of_the_run_whatever_gloo_makes_of_it(store: Store) -> None:
    with pytest.raises(RunError, match=r"Timed out after waiting for the other ranks for 0.1 s \(launch.timeout_s\)"):
        joining(store, 0, timeout_s=0.1).attend(waits)


def test_a_call_that_waits_raises_what_a_look_raises() -> None:
    def look() -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        interruptible(waits, look)
    with pytest.raises(TimeoutError):
        interruptible(waits, within_s=0.1)
    assert interruptible(lambda: 7) == 7
