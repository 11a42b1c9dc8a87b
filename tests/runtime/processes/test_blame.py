"""If ranks waited for each other in vain, the error says whether the network between their nodes is to blame."""

from __future__ import annotations

import pytest

from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.network import ListenAddress, NetworkView, Unreached
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import Fault, failed, raised
from launcher.runtime.processes.hang import _cut

A, B = ListenAddress(0, "a", "eth0", "10.0.0.1"), ListenAddress(2, "b", "eth0", "10.0.0.2")
WORLD = World(0, 4, 0, 2, 0, "cpu", "gloo")
LATE = RuntimeError("Timed out waiting 15000ms for recv operation to complete")
GONE = RuntimeError("Connection closed by peer [10.0.0.2]:4711")


class Asked(NetworkView):
    """Two nodes of two ranks, with a network that reports the given failures."""

    def __init__(self, *failed: Unreached) -> None:
        super().__init__(Place(rank=0, size=4, local_rank=0, local_size=2, attempt=0, host="127.0.0.1", port=1), {})
        self.nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
        self.failed = failed

    def unreached(self, within_s: float = 0, refused: bool = True) -> list[Unreached]:
        return list(self.failed)


CUT = Asked(Unreached(A, B, "No route to host"))


def faults(*errors: Exception) -> list[Fault]:
    return [raised(rank, 0, error) for rank, error in enumerate(errors)]


@pytest.mark.parametrize(
    ("network", "errors", "text"),
    [
        (
            CUT, (LATE, LATE, LATE, LATE),
            "rank 0 (on a) and the ranks of b waited for each other for 15 s (launch.timeout_s): the network between "
            "them is the cause: a (eth0, 10.0.0.1) does not reach b (eth0, 10.0.0.2): No route to host",
        ),
        (
            CUT, (LATE, LATE),
            "rank 0 (on a) waited for b for 15 s (launch.timeout_s): the network between them, or b itself, is the "
            "cause: a (eth0, 10.0.0.1) does not reach b (eth0, 10.0.0.2): No route to host",
        ),
        (
            Asked(), (LATE, LATE, LATE, LATE),
            "rank 0 and the other ranks, on a and b, waited for each other for 15 s (launch.timeout_s): the cause is "
            "the network between these nodes, which works again now, or ranks that do not call the same collectives",
        ),
    ],
    ids=["cut", "cut, and the other node cannot tell", "cut for a time"],
)  # fmt: skip
def test_the_network_is_named_with_both_nodes(network: NetworkView, errors: tuple[Exception, ...], text: str) -> None:
    found = faults(*errors)
    cut = _cut(found, WORLD, 15, network)
    assert cut is not None
    assert str(failed([*found, cut])).splitlines()[0] == text


@pytest.mark.parametrize(
    "errors", [(LATE, LATE), (LATE, LATE, GONE, GONE)], ids=["two say nothing", "two lost their peer"]
)
def test_a_network_that_answers_is_not_blamed_for_a_rank(errors: tuple[Exception, ...]) -> None:
    assert _cut(faults(*errors), WORLD, 15, Asked()) is None
