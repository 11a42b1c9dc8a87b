"""The ranks of an outer launcher join a run, and answer questions of rank 0."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from launcher.errors import Problem, RequestError, RunError
from launcher.runtime.cluster.messages import interruptible
from launcher.runtime.cluster.network import (
    AFTERWARDS_S,
    GLOO,
    NCCL,
    ListenAddress,
    NetworkView,
    Unreached,
    describe,
    is_loopback,
)
from launcher.runtime.cluster.rendezvous import ranks_text
from launcher.runtime.code_versions import of_a_rank
from launcher.runtime.faults import Interrupted, Preempted, signal_name

UNCONNECTED_KEY = "unconnected"
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
    """A rank was stopped before all ranks had joined: nothing is lost, and no rank waits for another."""


def another_connection(store: Store) -> Store:
    """Returns the same store over a separate connection: on one connection calls wait for each other."""
    connection: Any = store
    other: Store = interruptible(connection.clone)
    return other


class Joining:
    """How one rank joins. ``stop_signal()`` returns the signal that asked it to stop, or 0."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        network: NetworkView,
        timeout_s: float,
        stop_signal: Callable[[], int],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._network = network
        self._timeout_s = timeout_s
        self._stop_signal = stop_signal
        self._connections: list[Store] = []
        self._heard: list[Unconnected] = []

    def attend(self, join: Callable[[], None]) -> None:
        """Runs ``join``, which waits for the other ranks in native code.

        Raises ``Unjoined`` as soon as this rank or another is asked to stop, ``RunError`` when ``join`` fails
        here or elsewhere, or takes longer than the timeout. Gloo alone would wait five times as long.
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
                f"{self._where()}: Timed out after waiting for the other ranks for {limit}"
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
        if signum := self._stop_signal():
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
                if own.check([UNCONNECTED_KEY]):
                    self._heard.append(Unconnected(**json.loads(own.get(UNCONNECTED_KEY))))
                    return
        except RuntimeError:  # the store is gone or unreachable: ``join`` will fail too
            return

    def tell(self, text: str, signum: int = 0) -> None:
        """Informs the others if the store can be reached, within a limited time."""
        message = json.dumps(asdict(Unconnected(self._network.at.rank, text, signum)))
        within_s = STOP_S if signum else FAIL_S
        with suppress(RuntimeError, TimeoutError):
            interruptible(lambda: self._connection().set(UNCONNECTED_KEY, message), within_s=within_s)

    def _connection(self) -> Store:
        """Returns a second connection: ``join`` may block on its own."""
        if not self._connections:
            own = PrefixStore(self._prefix, another_connection(self._store))
            own.set_timeout(timedelta(seconds=self._timeout_s))
            self._connections.append(own)
        return self._connections[0]


class Question:
    """A question that every rank answers in its own process, as text."""

    doing = "have not answered rank 0"

    def answer(self, network: NetworkView) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class ListensAt(Question):
    """Asks each node's first rank where it listens. From then on all ranks use the interface in question.

    ``rendezvous``: the address by which other nodes reach the node of MASTER_ADDR.
    """

    rendezvous: str | None

    def answer(self, network: NetworkView) -> str:
        network.use(self.rendezvous)
        if not network.first_of_node:
            return "[]"
        try:
            return json.dumps([asdict(one) for one in network.listen()])
        except OSError as error:
            return json.dumps(f"{socket.gethostname()}: {error.strerror or error}")


@dataclass(frozen=True)
class UnreachablePeers(Question):
    """Asks which of ``peers`` a node's first rank cannot reach; ``nodes``: the node name of each rank."""

    peers: tuple[ListenAddress, ...]
    nodes: Mapping[int, str]

    def answer(self, network: NetworkView) -> str:
        network.peers = self.peers
        network.nodes = self.nodes
        failed = network.unreached() if network.first_of_node else []
        return json.dumps([asdict(one) for one in failed])


def about(network: NetworkView) -> str:
    """Returns what a rank sends about itself when it arrives."""
    route = network.route
    return json.dumps(
        {
            "node": socket.gethostname(),
            "first": network.first_of_node,
            "interface": None if route is None else asdict(route.interface),
            "rendezvous": None if route is None else route.address,
            "versions": of_a_rank() if network.several_nodes else {},
        }
    )


@dataclass(frozen=True)
class RankReports:
    """The ``about`` text of each rank, as rank 0 has received it; "" from a rank with an older launcher."""

    texts: Mapping[int, str]

    def answers(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((rank, json.loads(text)) for rank, text in sorted(self.texts.items()))

    def same_versions(self) -> None:
        """Raises ``RequestError`` if a rank's launcher, Python or torch differs from that of rank 0."""
        mine = of_a_rank()
        here = socket.gethostname()
        problems: dict[str, Problem] = {}
        for rank, text in sorted(self.texts.items()):
            if not text:
                line = f"rank {rank} has a different launcher than rank 0, of unknown version"
                problems.setdefault("", Problem("", f"{line}; all nodes need the same version"))
                continue
            info = json.loads(text)
            node = info["node"]
            for name, version in mine.items():
                other = info["versions"].get(name, "none")
                if other != version and f"{node} {name}" not in problems:
                    line = f"rank {rank} on {node} has {name} {other}, rank 0 on {here} has {version}"
                    problems[f"{node} {name}"] = Problem("", f"{line}; all nodes need the same version")
        if problems:
            raise RequestError(tuple(problems.values()))

    def rendezvous(self) -> str | None:
        """Returns the address by which other nodes reach the node of MASTER_ADDR.

        Returns ``None`` if the node is reached only by loopback.
        """
        reached = (each["rendezvous"] for _, each in self.answers())
        return next((one for one in reached if one is not None and not is_loopback(one)), None)

    def nodes(self, network: NetworkView) -> tuple[ListenAddress, ...]:
        """Returns the nodes, with the interfaces that reach the rendezvous; nothing listens there yet."""
        infos = [*self.answers(), (0, json.loads(about(network)))]
        nodes = []
        for rank, each in infos:
            if each["first"] and each["interface"] is not None:
                nodes.append(
                    ListenAddress(rank, each["node"], each["interface"]["name"], each["interface"]["address"])
                )
        return tuple(nodes)


def listeners(answers: Mapping[int, str]) -> tuple[ListenAddress, ...]:
    """Returns all nodes with the addresses at which they listen. Raises ``RunError`` if one cannot listen."""
    nodes: list[ListenAddress] = []
    for _, text in sorted(answers.items()):
        answer = json.loads(text)
        if isinstance(answer, str):
            raise RunError(answer)
        nodes += [ListenAddress(**one) for one in answer]
    return tuple(nodes)


def check_connections(answers: Iterable[str], rendezvous: str) -> None:
    """Raises ``RunError`` if a node cannot reach another."""
    failed: list[Unreached] = []
    for text in answers:
        for one in json.loads(text):
            failed.append(
                Unreached(ListenAddress(**one["source"]), ListenAddress(**one["target"]), one["why"])
            )
    if failed:
        raise RunError(describe(failed, rendezvous))


def silent(ranks: Sequence[int], network: NetworkView, waited_s: float) -> RunError:
    """Returns the error for ranks that do not answer rank 0.

    It names the network if their node is unreachable.
    """
    if failed := lost(ranks, network):
        return RunError(failed)
    there = ", ".join(dict.fromkeys(network.nodes[rank] for rank in ranks if rank in network.nodes))
    where = f" (on {there})" if there else ""
    return RunError(f"{ranks_text(ranks)}{where} have not answered rank 0 within {waited_s:g} s")


def lost(ranks: Sequence[int], network: NetworkView) -> str:
    """Describes an unreachable node of ``ranks``, which explains why they do not answer; else ""."""
    theirs = {network.nodes[rank] for rank in ranks if rank in network.nodes}
    for one in network.unreached(AFTERWARDS_S, refused=False):
        if one.target.node in theirs:
            end = f"the cause is the network between them, or {one.target.node} itself"
            return f"{one.source} no longer reaches {one.target} ({one.why}); {end}"
    return ""
