"""How rank 0 evaluates the answers of the other ranks."""

from __future__ import annotations

import json
import socket

import pytest

from launcher.errors import RequestError, RunError
from launcher.run.external_ranks.joining import RankReports, about, check_connections, listeners, silent
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.network import GLOO, ListenAddress, NetworkView
from launcher.runtime.code_versions import of_a_rank

MINE = of_a_rank()


def network(rank: int) -> NetworkView:
    at = Place(rank=rank, size=4, local_rank=rank % 2, local_size=2, attempt=0, host="127.0.0.1", port=1)
    return NetworkView(at, {GLOO: "lo"})


def about_text(**change: object) -> str:
    return json.dumps({"node": "b", "versions": MINE} | change)


def test_ranks_with_the_same_versions_are_let_in() -> None:
    RankReports({rank: about(network(rank)) for rank in range(1, 4)}).same_versions()


def test_other_versions_are_refused_by_node_and_name() -> None:
    other = {"versions": MINE | {"torch": "9.9", "launcher's source": "0123456789"}}
    texts = {1: about_text(node="a"), 2: about_text(**other), 3: about_text(**other)}
    with pytest.raises(RequestError) as caught:
        RankReports(texts).same_versions()
    here = socket.gethostname()
    assert [problem.text for problem in caught.value.problems] == [
        f"rank 2 on b has torch 9.9, rank 0 on {here} has {MINE['torch']}; all nodes need the same version",
        f"rank 2 on b has launcher's source 0123456789, rank 0 on {here} has {MINE[list(MINE)[-1]]}; all nodes need "
        "the same version",
    ]


def test_a_launcher_that_says_nothing_of_itself_is_another_one() -> None:
    with pytest.raises(RequestError, match="rank 1 has a different launcher than rank 0, of unknown version"):
        RankReports({1: ""}).same_versions()


def test_the_address_that_others_reach_is_no_loopback() -> None:
    found = [about_text(rendezvous=each) for each in ("127.0.1.1", None, "10.0.0.1")]
    assert RankReports(dict(enumerate(found, 1))).rendezvous() == "10.0.0.1"
    assert RankReports({1: found[0]}).rendezvous() is None


def test_a_node_that_cannot_listen_ends_the_start() -> None:
    with pytest.raises(RunError, match=r"^b: GLOO_SOCKET_IFNAME is eth7$"):
        listeners({0: "[]", 2: json.dumps("b: GLOO_SOCKET_IFNAME is eth7")})


def test_connections_that_work_are_nothing_to_tell() -> None:
    check_connections(["[]", "[]"], "10.0.0.1")


def test_ranks_that_do_not_answer_are_named_with_their_node() -> None:
    used = network(0)
    used.nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    used.peers = (ListenAddress(0, "a", "lo", "127.0.0.1"), ListenAddress(2, "b", "lo", "127.0.0.1"))
    assert str(silent([2, 3], used, 60)) == "ranks 2, 3 (on b) have not answered rank 0 within 60 s"
