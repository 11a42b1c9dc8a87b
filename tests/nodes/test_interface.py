"""The ranks of two nodes use the interface that reaches the rendezvous, whatever their host names resolve to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.nodes import Node, Nodes, ended, missing
from tests.run.launching import TINY, losses

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
PAIR = (*TINY, "parallel.hsdp=null", "train.steps=2")


def a_dead_end(node: Node) -> None:
    """Add a second interface, which leads nowhere."""
    node.ip("link", "add", "dead0", "type", "veth", "peer", "name", "dead1")
    node.ip("addr", "add", f"10.99.0.{node.index + 1}/24", "dev", "dead0")
    for name in ("dead0", "dead1"):
        node.ip("link", "set", name, "up")


def hosts(tmp_path: Path, near: str, far: str) -> str:
    """Lines of bash that give each node its own /etc/hosts."""
    for index, text in enumerate((near, far)):
        (tmp_path / f"hosts{index}").write_text(f"127.0.0.1 localhost\n{text}\n")
    return f"mount --bind {tmp_path}/hosts$NODE /etc/hosts"


def test_names_that_stand_for_a_loopback_and_for_a_dead_end(nodes: Nodes, tmp_path: Path) -> None:
    """As on Debian, the first node's name resolves to 127.0.1.1 there. The other's name leads to a dead interface."""
    for node in nodes.pair:
        a_dead_end(node)
    before = hosts(tmp_path, "127.0.1.1 node0", "10.77.0.1 node0\n10.99.0.2 node1")
    started = nodes.ranks(tmp_path / "run", *PAIR, host="node0", before=before)
    assert ended(started) == [0, 0], started[0].said()
    assert "network: eth0 (10.77.0.1) reaches the rendezvous at node0:" in started[0].said()
    assert len(losses(tmp_path / "run")) == 2


def test_an_ipv6_rendezvous_and_names_that_stand_for_nothing(nodes: Nodes, tmp_path: Path) -> None:
    for node in nodes.pair:
        node.ip("addr", "del", f"{node.address}/24", "dev", "eth0")
    started = nodes.ranks(tmp_path / "run", *PAIR, host=nodes.pair[0].address6)
    assert ended(started) == [0, 0], started[0].said()
    assert "network: eth0 (fd77::1) reaches the rendezvous at [fd77::1]:" in started[0].said()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "dead0",
            "node0 (dead0, 10.99.0.1) cannot reach node1 (dead0, 10.99.0.2): No route to host (2 connections between "
            "nodes fail); GLOO_SOCKET_IFNAME is set on node0 and node1: set it to the interface that reaches the other "
            "nodes",
        ),
        ("eth7", "node0: GLOO_SOCKET_IFNAME is eth7, but the interfaces of this node are lo, eth0, dead0, dead1"),
    ],
)
def test_a_wrong_interface_is_named_and_nothing_is_written(nodes: Nodes, tmp_path: Path, name: str, text: str) -> None:
    for node in nodes.pair:
        a_dead_end(node)
    started = nodes.ranks(tmp_path / "run", *PAIR, env={"GLOO_SOCKET_IFNAME": name})
    assert ended(started) == [1, 1], started[0].said()
    assert started[0].error() == f"error: {text}"
    assert "error" not in started[1].said()
    assert not (tmp_path / "run").exists()
