"""The network interfaces of this machine, and the routes to other machines."""

from __future__ import annotations

import socket

import pytest

from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.network import (
    GLOO,
    NCCL,
    Interface,
    ListenAddress,
    NetworkView,
    Route,
    Unreached,
    describe,
    having,
    interfaces,
    named,
    route,
)

LOOPBACK = Interface("lo", "127.0.0.1")


def at(host: str = "127.0.0.1", rank: int = 0, port: int = 1) -> Place:
    return Place(rank=rank, size=4, local_rank=rank % 2, local_size=2, attempt=0, host=host, port=port)


def test_the_loopback_is_an_interface_of_this_machine() -> None:
    assert {each.name for each in interfaces()} <= {name for _, name in socket.if_nameindex()}
    assert LOOPBACK in interfaces()
    assert named("lo") == having("127.0.0.1") == LOOPBACK
    assert named("nosuchnet0") is None


def test_a_loopback_is_reached_by_the_loopback() -> None:
    assert route("127.0.0.1", 29500) == Route(LOOPBACK, "127.0.0.1")
    assert route("localhost", 29500) in (Route(LOOPBACK, "127.0.0.1"), Route(Interface("lo", "::1"), "::1"))


def test_every_own_address_is_reached_by_the_interface_that_has_it() -> None:
    for each in interfaces():
        if "%" not in each.address:
            assert route(each.address, 29500) == Route(each, each.address)


def test_the_interface_is_set_for_gloo_and_nccl_unless_the_user_set_it() -> None:
    env: dict[str, str] = {}
    network = NetworkView(at(), env)
    network.use()
    assert env == {GLOO: "lo", NCCL: "=lo"}
    assert network.note() == "network: lo (127.0.0.1) reaches the rendezvous at 127.0.0.1:1"
    network.close()
    assert env == {}

    env = {NCCL: "ib", GLOO: ""}
    network = NetworkView(at(), env)
    network.use()
    assert env == {NCCL: "ib", GLOO: "lo"}
    assert network.note().endswith("127.0.0.1:1; NCCL_SOCKET_IFNAME=ib is set")
    network.close()
    assert env == {NCCL: "ib"}


def test_a_name_that_stands_for_no_address_leaves_the_choice_to_gloo() -> None:
    env: dict[str, str] = {}
    network = NetworkView(at("no such host"), env)
    network.use()
    assert env == {}
    assert network.note() == ("network: no interface reaches the rendezvous at no such host:1; set GLOO_SOCKET_IFNAME")


def test_a_loopback_name_gives_way_to_the_address_that_others_reach() -> None:
    """One machine can show this only if it has another address than the loopback."""
    other = next((each for each in interfaces() if not each.loopback and "%" not in each.address), None)
    if other is None:
        pytest.skip("this machine has no interface but the loopback")
    env: dict[str, str] = {}
    network = NetworkView(at(), env)
    network.use(other.address)
    assert env == {GLOO: other.name, NCCL: f"={other.name}"}

    # another node's address does not belong to this machine
    network = NetworkView(at(), env := {})
    network.use("192.0.2.77")
    assert env == {GLOO: "lo", NCCL: "=lo"}


def test_a_node_that_listens_is_reached_and_one_that_has_gone_is_not() -> None:
    near, far = NetworkView(at(rank=0), {GLOO: "lo"}), NetworkView(at(rank=2), {GLOO: "lo"})
    near.peers = far.peers = peers = (*near.listen(), *far.listen())
    assert near.unreached() == far.unreached() == []

    # a port on which nobody listens any more
    far.close()
    [failed] = near.unreached()
    assert (failed.source, failed.target, failed.why) == (*peers, "Connection refused")
    assert near.unreached(refused=False) == []
    near.close()


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(
        OSError, match=r"GLOO_SOCKET_IFNAME is nosuchnet0, but the interfaces of this node are .*\blo\b"
    ):
        NetworkView(at(), {GLOO: "nosuchnet0"}).listen()


def test_the_line_of_a_connection_that_fails() -> None:
    near, far = ListenAddress(0, "a", "eth0", "10.0.0.1"), ListenAddress(2, "b", "eth0", "10.0.0.2")
    text = "a (eth0, 10.0.0.1) cannot reach b (eth0, 10.0.0.2): No route to host"
    assert describe([Unreached(near, far, "No route to host")], "head") == (
        f"{text}; these interfaces reach MASTER_ADDR (head); set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to others"
    )
    set_by_user = ListenAddress(2, "b", "eth0", "10.0.0.2", set_by_user=True)
    both = [Unreached(set_by_user, near, "why"), Unreached(near, set_by_user, "No route to host")]
    assert describe(both, "head") == (
        f"{text} (2 connections between nodes fail); GLOO_SOCKET_IFNAME is set on b: set it to the interface that "
        "reaches the other nodes"
    )


def test_ipv4_and_ipv6_do_not_connect() -> None:
    near = NetworkView(at(rank=0), {GLOO: "lo"})
    near.peers = (*near.listen(), ListenAddress(2, "b", "lo", "::1", 5))
    assert [one.why for one in near.unreached()] == ["one has an IPv4 address, the other an IPv6 address"]
    near.close()
