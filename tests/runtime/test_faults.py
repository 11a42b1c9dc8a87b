"""The error names the failure that has to be repaired."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher.runtime.cluster.world import World
from launcher.runtime.faults import Fault, RanksFailed, died, failed, raised, root, write
from tests.ranks import on_ranks


def fault(rank: int, time_ns: int, message: str = "boom", *, echo: bool = False, traceback: str = "Trace") -> Fault:
    return Fault(rank, 0, "ValueError", message, traceback, time_ns, echo)


def collective() -> None:
    dist.all_reduce(torch.ones(1))


def breaking(how):
    """Work in which rank 1 breaks while the others wait for it in a collective."""

    def work(world: World) -> None:
        collective()
        if world.rank == 1:
            how()
        collective()

    return work


def boom() -> None:
    raise ValueError("boom")


ENDS = {
    "exception": (boom, "rank 1: ValueError: boom"),
    "sigkill": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "rank 1 was killed by SIGKILL (out of memory? see dmesg)",
    ),
    "segfault": (
        lambda: ctypes.string_at(0),
        "rank 1 was killed by SIGSEGV (a crash in native code; its stack is in the rank's log)",
    ),
    "abort": (
        os.abort,
        (
            "rank 1 was killed by SIGABRT (native code aborted, as it does when the "
            "shapes of tensors differ between ranks)"
        ),
    ),
    "sigterm": (
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        "rank 1 was killed by SIGTERM (a user or the system ended only this rank)",
    ),
    "exit": (lambda: os._exit(3), "rank 1 ended with exit code 3 and no Python error"),
    "quiet exit": (lambda: os._exit(0), "rank 1 ended with exit code 0 and no Python error"),
    "sys.exit": (lambda: exec("raise SystemExit(0)"), "rank 1: SystemExit: 0"),
}


@pytest.mark.parametrize(("how", "headline"), ENDS.values(), ids=ENDS)
def test_the_rank_that_broke_is_named_and_its_victims_are_not(how, headline):
    with pytest.raises(RanksFailed) as caught:
        on_ranks(3, breaking(how))
    message = str(caught.value)
    assert message.splitlines()[0] == headline
    assert "Connection" not in message
    assert caught.value.fault.rank == 1


def test_the_traceback_starts_at_the_work_of_the_rank():
    with pytest.raises(RanksFailed) as caught:
        on_ranks(2, breaking(boom))
    line = boom.__code__.co_firstlineno + 1
    frames = [text for text in caught.value.fault.traceback.splitlines() if text.startswith("  File ")]
    assert frames[0].endswith(", in call")
    assert frames[-1] == f'  File "{__file__}", line {line}, in boom'
    assert "/tests/ranks.py" in frames[0]
    assert str(caught.value).splitlines()[1] == "Traceback (most recent call last):"


def test_a_rank_that_waits_for_nobody_is_killed_and_said_so():
    def work(world: World) -> None:
        collective()
        if world.rank == 1:
            raise ValueError("boom")
        signal.pause()

    with pytest.raises(RanksFailed) as caught:
        on_ranks(2, work)
    assert str(caught.value) == (
        f"rank 1: ValueError: boom\n{caught.value.fault.traceback}\nstill running, so killed: rank 0"
    )


def test_an_error_before_the_ranks_met_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchnet0")
    with pytest.raises(RanksFailed) as caught:
        on_ranks(2, lambda _: None)
    assert "nosuchnet0" in str(caught.value).splitlines()[0]


def test_a_collective_too_many_names_the_rank_that_had_finished():
    with pytest.raises(RanksFailed) as caught:
        on_ranks(2, lambda world: collective() if world.rank == 0 else None)
    assert str(caught.value).splitlines()[-1] == (
        "had finished by then: rank 1 (one collective fewer than the others?)"
    )


def test_every_fault_leaves_a_record(tmp_path):
    def work(world: World) -> None:
        collective()
        if world.rank == 1:
            raise ValueError("boom")
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        signal.pause()

    with pytest.raises(RanksFailed) as caught:
        on_ranks(3, work, folder=tmp_path)
    records = {p.stem: json.loads(p.read_text()) for p in sorted((tmp_path / "errors").iterdir())}
    assert [(name, r["rank"], r["attempt"], r["type"], r["message"], r["echo"]) for name, r in records.items()] == [
        ("rank1", 1, 0, "ValueError", "boom", False),
        ("rank2", 2, 0, "SIGSEGV", ends("segfault"), False),
    ]
    log = (tmp_path / "logs" / "rank1.log").read_text()
    assert log == records["rank1"]["traceback"] + "\n"
    assert "Fatal Python error: Segmentation fault" in (tmp_path / "logs" / "rank2.log").read_text()
    assert str(caught.value).splitlines()[-1] == f"log: {tmp_path / 'logs' / f'rank{caught.value.fault.rank}.log'}"


def ends(name: str) -> str:
    return ENDS[name][1].removeprefix("rank 1 ")


def test_the_earliest_failure_is_the_cause_unless_it_is_an_echo():
    faults = [fault(0, 1, echo=True), fault(1, 3), fault(2, 2)]
    assert root(faults).rank == 2
    assert root([fault(0, 2, echo=True), fault(1, 1, echo=True)]).rank == 1


def test_the_whole_message_tells_what_became_of_every_rank():
    faults = [
        fault(0, 9, "gone", echo=True),
        fault(1, 1, traceback="Traceback (most recent call last):\n  ...\nValueError: boom"),
        fault(2, 5),
        fault(3, 4, "other"),
        died(4, 0, -signal.SIGKILL),
        fault(5, 9, "gone", echo=True),
    ]
    assert str(failed(faults, killed={7, 6}, finished=[8], folder=Path("runs/x/0001"))) == (
        "rank 1: ValueError: boom\n"
        "Traceback (most recent call last):\n"
        "  ...\n"
        "ValueError: boom\n"
        "also failed, the same way: rank 2\n"
        "also failed: rank 3: ValueError: other\n"
        "also failed: rank 4 was killed by SIGKILL (out of memory? see dmesg)\n"
        "also ended: ranks 0, 5 (lost their peer)\n"
        "still running, so killed: ranks 6, 7\n"
        "log: runs/x/0001/logs/rank1.log"
    )


def test_a_timeout_is_distinguished_from_a_lost_connection():
    said = ["Timed out waiting 5000ms for recv", "Application timeout caused pair closure", "Connection reset by peer"]
    assert [raised(0, 0, RuntimeError(text)).late for text in said] == [True, True, False]
    assert not raised(0, 0, ValueError("the server timed out")).late


def test_an_error_that_wraps_an_echo_is_one():
    error = ValueError("step 3 failed")
    assert not raised(0, 0, error).echo
    error.__cause__ = RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:40000")
    assert raised(0, 0, error).echo


def test_a_signal_without_a_name_is_numbered():
    assert died(0, 0, -40).message == "was killed by signal 40"


def test_a_reader_never_sees_a_partly_written_fault(tmp_path):
    """Rank 0 of an outer launcher reads while others write: a truncated file would give it another error."""
    written = [fault(1, n, "boom" * 500 * (n % 2)) for n in range(100)]
    write(written[0], tmp_path)
    over = threading.Event()

    def work() -> None:
        for one in written:
            write(one, tmp_path)
        over.set()

    writer = threading.Thread(target=work)
    writer.start()
    seen = []
    while not over.is_set():
        seen.append(Fault(**json.loads((tmp_path / "errors/rank1.json").read_text())))
    writer.join()
    assert set(seen) <= set(written)
    assert [p.name for p in (tmp_path / "errors").iterdir()] == ["rank1.json"]
