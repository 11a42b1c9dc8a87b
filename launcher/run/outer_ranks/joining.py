"""Joins the process group of an outer launcher's ranks: one that fails or is stopped ends the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from launcher.errors import RunError
from launcher.runtime.cluster.interruptible import interruptible
from launcher.runtime.cluster.network import GLOO, NCCL, Network
from launcher.runtime.faults import Interrupted, Preempted, signal_name

KEY = "unconnected"
LOOK_S = 0.1
MARGIN_S = 2.0  # seconds: torch's own error is more exact, so it should come first
STOP_S, FAIL_S = 0.5, 5.0
"""Seconds for a rank that was stopped, and for one that failed, to inform the others."""


@dataclass(frozen=True)
class Unconnected:
    """Why a rank has not joined: a signal stopped it, or ``text`` says what failed."""

    rank: int
    text: str
    signum: int = 0


class Unjoined(Preempted):
    """A rank was stopped before the ranks had joined: nothing is lost, and it waits for no other rank."""


def another_connection(store: Store) -> Store:
    """The same store over a separate connection: on one connection calls wait for each other."""
    connection: Any = store
    other: Store = interruptible(connection.clone)
    return other


class Joining:
    """How one rank joins. ``told()`` returns the signal that asked it to stop, or 0."""

    def __init__(
        self, store: Store, prefix: str, network: Network, timeout_s: float, told: Callable[[], int]
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._network = network
        self._timeout_s = timeout_s
        self._told = told
        self._connections: list[Store] = []
        self._heard: list[Unconnected] = []

    def attend(self, join: Callable[[], None]) -> None:
        """Runs ``join``, which waits for the other ranks in native code.

        Raises ``Unjoined`` as soon as this rank or another is asked to stop, ``RunError`` when ``join`` fails
        here or elsewhere, or takes longer than the timeout: gloo would take five times as long.
        """
        over = threading.Event()
        threading.Thread(target=self._listen, args=(over,), name="unconnected", daemon=True).start()
        try:
            interruptible(join, self._look, self._timeout_s + MARGIN_S)
            return
        except Interrupted as stop:
            by_choice = stop.signum if isinstance(stop, Preempted) else 0
            self.tell(f"it was stopped by {signal_name(stop.signum)}", by_choice)
            raise
        except TimeoutError:
            limit = f"{self._timeout_s:g} s (launch.timeout_s)"
            failed: Exception = RunError(
                f"{self._where()}: Timed out waiting for the other ranks for {limit}"
            )
        except RunError:  # another rank has failed and reports why
            raise
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            text = f"{self._where()} cannot connect to the other ranks: {why}"
            failed = RunError(f"{text}; {GLOO} and {NCCL} choose the interface")
            failed.__cause__ = error
        finally:
            over.set()
        self.tell(str(failed))
        raise failed

    def _where(self) -> str:
        return self._network.here()

    def _look(self) -> None:
        if signum := self._told():
            raise Unjoined(signum)
        if not self._heard:
            return
        other = self._heard[0]
        if other.signum:
            raise Unjoined(other.signum)
        raise RunError(f"rank {other.rank} has failed to connect: {other.text}")

    def _listen(self, over: threading.Event) -> None:
        """Waits for reports of other ranks."""
        try:
            own = self._connection()
            while not over.wait(LOOK_S):
                if own.check([KEY]):
                    self._heard.append(Unconnected(**json.loads(own.get(KEY))))
                    return
        except RuntimeError:  # the store is gone or unreachable: ``join`` will fail too
            return

    def tell(self, text: str, signum: int = 0) -> None:
        """Informs the others if the store can be reached, within a limited time."""
        said = json.dumps(asdict(Unconnected(self._network.at.rank, text, signum)))
        within_s = STOP_S if signum else FAIL_S
        with suppress(RuntimeError, TimeoutError):
            interruptible(lambda: self._connection().set(KEY, said), within_s=within_s)

    def _connection(self) -> Store:
        """A connection that ``join`` does not use, as it may be blocked on its own."""
        if not self._connections:
            own = PrefixStore(self._prefix, another_connection(self._store))
            own.set_timeout(timedelta(seconds=self._timeout_s))
            self._connections.append(own)
        return self._connections[0]
