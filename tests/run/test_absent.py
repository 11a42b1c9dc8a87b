"""Ranks that do not start, die, hang or see another disk are reported in time by a rank that is alive."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from launcher.errors import RunError
from launcher.run.external_ranks.trial_layouts import LAST_WORD_S
from launcher.runtime.cluster import rendezvous
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.messages import CAUSE, Messages, Secret
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.hang import _silent
from tests.ports import free_port
from tests.run.launching import TINY, checkpoints, reached, status, until
from tests.run.tasks import tasks
from tests.tiers import some

TWO = (*TINY, "parallel.pipeline.stages=1", "launch.nproc=2")


def end(task: subprocess.Popen[str], within_s: float = 300) -> tuple[int, list[str]]:
    said = task.communicate(timeout=within_s)[0]
    return task.returncode, said.splitlines()


def test_a_rank_that_does_not_come_is_named(tmp_path):
    with tasks(2, *TWO, f"runs={tmp_path}/runs", "launch.timeout_s=2", only=[0]) as [first]:
        code, said = end(first)
    assert (code, said) == (
        1,
        [
            "error: rank 1 of 2 has not connected within 2 s (launch.timeout_s); "
            "each must be started with the same MASTER_ADDR and MASTER_PORT"
        ],
    )
    assert not (tmp_path / "runs").exists()


def test_missing_ranks_are_named_once_after_a_while(monkeypatch):
    monkeypatch.setattr(rendezvous, "SAY_S", 0.05)
    store, said = Messages(HashStore(), Secret(b"k")), []
    store.set("here2", "")
    assert rendezvous.await_ranks(store, "here", [1, 2, 3], 0.3, said.append, "must come") == [1, 3]
    assert said == ["waiting for ranks 1, 3, which must come"]


@pytest.mark.parametrize(
    ("host", "here", "why"),
    [("127.0.0.1", " (lo, 127.0.0.1)", "Connection refused"), ("nowhere.invalid", "", None)],
    ids=["nobody there", "no such host"],
)
def test_a_rank_that_cannot_find_rank_0_says_where_it_has_looked(host, here, why, tmp_path):
    env = {"MASTER_ADDR": host, "MASTER_PORT": "9"}
    with tasks(2, *TWO, f"runs={tmp_path}/runs", "launch.timeout_s=2", only=[1], env=env) as [second]:
        code, said = end(second)
    assert code == 1
    assert len(said) == 1
    me = f"rank 1 on {socket_name()}{here}"
    head = f"error: {me}: rank 0 has not answered at {host}:9 within 2 s (launch.timeout_s): "
    assert said[0].startswith(head + (why or ""))
    assert said[0].endswith("; set MASTER_ADDR and MASTER_PORT to its address")


def test_the_store_of_an_agent_is_awaited_for_a_shorter_time(monkeypatch):
    """The store of an agent exists before its ranks start, so they do not wait for it as long as for rank 0."""
    monkeypatch.setattr(rendezvous, "AGENT_S", 0.1)
    monkeypatch.setattr(rendezvous, "SAY_S", 0.1)
    at = Place(0, 2, 0, 1, 0, "127.0.0.1", 9, hosted=True)
    said: list[str] = []
    text = "rank 0 on a: the launcher of the ranks has not answered at 127.0.0.1:9 within 0.1 s: Connection refused; "
    with pytest.raises(RunError, match=f"^{text}set MASTER_ADDR and MASTER_PORT to its address$"):
        rendezvous.open_store(at, lambda: 3600.0, said.append, where="a")
    assert said == ["rank 0 on a waits for the launcher of the ranks at 127.0.0.1:9: Connection refused"]


def test_ranks_with_other_secrets_end_at_once(tmp_path):
    """Rank 0 does not wait for the answer of a rank that cannot read its messages."""
    words, port = (*TWO, f"runs={tmp_path}/runs"), str(free_port())
    keys = [{"MASTER_PORT": port, "LAUNCHER_SECRET": secret} for secret in "ab"]
    with tasks(2, *words, only=[0], env=keys[0]) as [first], tasks(2, *words, only=[1], env=keys[1]) as [second]:
        one = end(second)
        began = time.monotonic()
        zero = end(first)
    why = f"in the store of this job is not signed with its secret: {CAUSE}"
    assert one == (1, [f"error: rank 1: word0 {why}"])
    assert zero == (1, [f"error: size1 {why}"])
    assert time.monotonic() - began < LAST_WORD_S / 2
    assert not (tmp_path / "runs").exists()


def test_waiting_for_a_rank_that_has_refused_a_message_raises_an_error():
    store = Messages(HashStore(), Secret(b"k"))
    Messages(store._store, Secret(b"other")).refuse(2)
    with pytest.raises(rendezvous.MessageRefused) as caught:
        rendezvous.await_ranks(store, "heard0.", [1, 2], 60, print, "must answer")
    text = "rank 2 has refused a message in the store of this job, which is not signed with its secret"
    assert str(caught.value) == f"{text}: {CAUSE}"
    assert rendezvous.await_ranks(store, "heard0.", [1], 0.1, print, "must answer") == [1]


def test_a_port_that_is_taken_is_said_by_rank_0(tmp_path):
    import socket

    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        with tasks(2, *TWO, f"runs={tmp_path}/runs", only=[0], env={"MASTER_PORT": port}) as [first]:
            code, said = end(first)
    text = f"rank 0 cannot listen on port {port}: Address already in use; set MASTER_PORT to another one"
    assert (code, [line.strip() for line in said if port in line]) == (2, [text])


def test_a_run_folder_that_is_not_shared_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    homes = {0: tmp_path / "a", 1: tmp_path / "b"}
    for home in homes.values():
        home.mkdir()
    host = socket_name()
    with tasks(2, *TWO, "runs=deep/runs", cwd=homes) as [first, second]:
        (code, said), other = end(first), end(second)
    text = (
        f"runs = deep/runs: rank 1 (on {host}) cannot see what rank 0 (on {host}) has written there; "
        "all ranks need one folder on a shared file system, at the same path"
    )
    assert (code, other) == (2, (2, []))
    assert text in [line.strip() for line in said]
    assert [list(home.iterdir()) for home in homes.values()] == [[], []]


def socket_name() -> str:
    import socket

    return socket.gethostname()


# On a busy machine ranks start seconds apart, so only cases that end by a time limit have a short one.
KILLS = {
    "rank 0 is killed": (0, signal.SIGKILL, 1, 300, "has died without a message (SIGKILL? out of memory? see dmesg)"),
    "rank 1 is stopped": (
        1,
        signal.SIGSTOP,
        0,
        20,
        "hung for 20 s (launch.timeout_s): it is stopped (SIGSTOP, Ctrl-Z or a debugger)",
    ),
}


@pytest.mark.parametrize(("rank", "signum", "teller", "limit", "told"), some(KILLS.values()), ids=some(KILLS))
def test_the_rank_that_died_or_hangs_is_named_by_one_that_lives(rank, signum, teller, limit, told, tmp_path):
    folder = tmp_path / "run"
    with tasks(2, *TWO, f"run_dir={folder}", "train.steps=2000", f"launch.timeout_s={limit}") as started:
        until(reached(folder, 2), started[teller])
        started[rank].send_signal(signum)
        code, said = end(started[teller])
    assert code == 1
    assert [line for line in said if line.startswith("error: ")] == [f"error: rank {rank} {told}"]


def test_a_rank_on_another_machine_is_named_only_while_no_other_is_known_to_be_dead():
    world = World(0, 4, 0, 2, 0, "cpu", "gloo")
    with subprocess.Popen(["true"]) as gone:
        pass
    here = {2: f"{socket_name()} {gone.pid}", 3: "elsewhere 1"}

    def told(*ranks: int) -> list[str]:
        return [f.headline for f in _silent(ranks, world, lambda rank: here.get(rank, ""), 5)]

    assert told(1, 2, 3) == ["rank 2 has died without a message (SIGKILL? out of memory? see dmesg)"]
    assert told(1, 3) == [
        "rank 1 does not answer: it died, or it hangs",
        "rank 3 does not answer: it died, or it hangs, on elsewhere",
    ]


def test_tasks_that_are_told_to_stop_save_and_leave_with_75(tmp_path):
    folder = tmp_path / "run"
    with tasks(2, *TWO, f"run_dir={folder}", "train.steps=2000") as started:
        until(reached(folder, 2), started[0])
        for task in started:
            task.send_signal(signal.SIGTERM)
        assert [end(task)[0] for task in started] == [75, 75]
    told = f"preempted by SIGTERM: saved {checkpoints(folder)[-1]}, from which the same command resumes"
    assert {k: status(folder)[k] for k in ("status", "error")} == {"status": "preempted", "error": told}


def test_tasks_that_still_wait_for_rank_0_leave_with_75(tmp_path):
    with tasks(2, *TWO, f"runs={tmp_path}/runs", only=[1]) as [second]:
        until(lambda: catches(second.pid, signal.SIGTERM), second)
        second.send_signal(signal.SIGTERM)
        assert end(second) == (75, [])


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether a process has a handler for the signal."""
    [mask] = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line]
    return bool(int(mask, 16) >> (signum - 1) & 1)
