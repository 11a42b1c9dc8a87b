"""Ranks accept from their store only what somebody with the secret of the job has written."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore

from launcher.errors import RequestError, RunError
from launcher.runtime.cluster import messages, rendezvous
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.messages import Messages, Secret, private_file, secret

ONE = Place(0, 2, 0, 2, 0, "localhost", 23456)
TWO = replace(ONE, size=4)


def test_a_signed_message_is_read():
    store = HashStore()
    Messages(store, Secret(b"k")).within("launcher0").set("word0", b"body")
    other = Messages(store, Secret(b"k")).within("launcher0")
    assert other.check(["word0"])
    assert other.get("word0") == b"body"


def of_another_job(store):
    Messages(store, Secret(b"other")).within("launcher0").set("word0", b"body")


def moved(store):
    Messages(store, Secret(b"k")).within("launcher0").set("word1", b"body")
    store.set("launcher0/word0", store.get("launcher0/word1"))


def of_another_attempt(store):
    Messages(store, Secret(b"k")).within("launcher1").set("word0", b"body")
    store.set("launcher0/word0", store.get("launcher1/word0"))


def short(store):
    store.set("launcher0/word0", b"")


@pytest.mark.parametrize("write", [of_another_job, moved, of_another_attempt, short])
def test_a_message_without_a_valid_signature_is_refused(write):
    store = HashStore()
    write(store)
    with pytest.raises(RunError) as caught:
        Messages(store, Secret(b"k")).within("launcher0").get("word0")
    assert str(caught.value) == (
        "word0 in the store of this job is not signed with its secret: another program wrote it, or the ranks have "
        "different secrets; set LAUNCHER_SECRET to the same value on all ranks"
    )


def test_the_environment_has_a_secret():
    env = {"LAUNCHER_SECRET": "a", "HOME": "/nowhere"}
    assert secret(ONE, env) == secret(replace(ONE, rank=1, local_rank=1), env)
    assert secret(ONE, env) != secret(ONE, {**env, "LAUNCHER_SECRET": "b"})
    assert secret(ONE, env) != secret(replace(ONE, port=23457), env)  # another job
    assert not secret(TWO, env).derived


def test_ranks_of_a_node_share_a_file_that_nobody_else_can_read(tmp_path):
    env = {"HOME": str(tmp_path)}
    one = secret(ONE, env)
    file = tmp_path / ".local/state/launcher/secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in file.parent.iterdir()] == ["secret"]
    assert secret(replace(ONE, rank=1, local_rank=1), env) == one
    assert not one.derived
    file.unlink()
    assert secret(ONE, env) != one


def test_a_file_that_others_can_read_or_that_leads_elsewhere_is_refused(tmp_path):
    env = {"HOME": str(tmp_path)}
    secret(ONE, env)
    file = tmp_path / ".local/state/launcher/secret"
    file.chmod(0o640)
    with pytest.raises(RequestError) as caught:
        secret(ONE, env)
    cure = "remove it, and the next start creates a new one"
    assert str(caught.value) == f"{file}: other users can read it, or own it; {cure}"
    file.chmod(0o600)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="it is a link"):
        secret(ONE, env)
    file.unlink()
    file.write_text("short")
    file.chmod(0o600)
    with pytest.raises(RequestError, match="it is not a secret of the launcher"):
        secret(ONE, env)


def test_a_file_that_the_environment_names_is_the_secret_of_all_nodes(tmp_path):
    file = tmp_path / "run/.secret"
    assert private_file(file) == file == private_file(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    env = {"LAUNCHER_SECRET_FILE": str(file), "HOME": "/nowhere"}
    assert secret(TWO, env) == secret(replace(TWO, rank=1), env)
    assert not secret(TWO, env).derived
    assert secret(TWO, {**env, "LAUNCHER_SECRET": "a"}) != secret(TWO, env)
    file.chmod(0o644)
    assert private_file(file) is None
    with pytest.raises(RequestError, match="other users can read it"):
        secret(TWO, env)
    file.unlink()
    with pytest.raises(RequestError) as caught:
        secret(TWO, env)
    assert str(caught.value) == (
        f"LAUNCHER_SECRET_FILE={file}: No such file or directory; unset it, or set LAUNCHER_SECRET"
    )


def test_nodes_that_may_not_share_a_home_say_that_they_derive_it(tmp_path):
    found = secret(TWO, {"HOME": str(tmp_path)})
    home = tmp_path / ".local/state/launcher"
    assert (found.derived, found.why) == (
        True, f"LAUNCHER_SECRET is not set, and {home} may not be shared by all nodes",
    )  # fmt: skip
    assert not home.exists()
    assert secret(ONE, {}).why == "LAUNCHER_SECRET is not set, nor is HOME"


def test_nodes_with_a_home_on_the_network_share_its_file(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"rootfs / ext4 rw 0 0\nserver:/home {tmp_path} nfs4 rw 0 0\n")
    assert messages._on_network(tmp_path / "a", mounts)
    mounts.write_text(f"server:/ / nfs rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n")
    assert not messages._on_network(tmp_path / "a", mounts)


@pytest.mark.parametrize(
    ("host", "spans", "address"),
    [
        ("127.0.0.1", False, "127.0.0.1"),
        ("localhost", False, None),
        ("127.0.0.1", True, ""),
        ("192.0.2.1", True, ""),
        ("no.such.name.invalid", False, ""),
    ],
    ids=["one node", "by name", "a loopback that other nodes do not reach", "not this machine's", "no name"],
)
def test_rank_0_listens_at_the_address_of_the_rendezvous(host, spans, address):
    found = rendezvous._interface(replace(TWO if spans else ONE, host=host))[1]
    assert found == address if address is not None else found in ("127.0.0.1", "::1")


def test_a_store_of_one_node_listens_on_the_loopback_alone():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    at = replace(ONE, host="127.0.0.1", port=port)
    store = rendezvous.open_store(at, lambda: 5, print)
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    listening = [line.split()[1] for table in tables for line in table if line.split()[3] == "0A"]
    assert f"0100007F:{port:04X}" in listening
    assert not [one for one in listening if one.endswith(f":{port:04X}") and not one.startswith("0100007F")]
    assert store.check(["nothing"]) is False
