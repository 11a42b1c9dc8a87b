"""What ``run_ranks`` returns from the work of ranks."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from launcher.errors import RequestError
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import RanksFailed
from launcher.runtime.processes.start_and_restart import run_ranks
from tests.ranks import on_ranks


def total(world: World) -> float:
    tensor = torch.tensor(float(world.rank + 1))
    dist.all_reduce(tensor)
    return tensor.item()


def test_results_come_in_rank_order():
    assert on_ranks(4, lambda world: (world.rank, total(world))) == [(0, 10.0), (1, 10.0), (2, 10.0), (3, 10.0)]


def test_a_rank_knows_its_place():
    [_, world] = on_ranks(2, lambda world: (world.rank, world.size, world.local_rank, world.attempt, world.device))
    assert world == (1, 2, 1, 0, "cpu")


def test_a_rank_finds_its_place_in_the_environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert on_ranks(2, lambda _: [os.environ[n] for n in names]) == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]


def test_ranks_have_the_threads_they_were_given():
    assert on_ranks(2, lambda _: torch.get_num_threads(), threads=2) == [2, 2]


@pytest.mark.parametrize("port", [None, 0])
def test_ranks_meet_by_file_and_by_port(port):
    assert run_ranks(total, 2, timeout_s=60, port=port) == [3.0, 3.0]


def test_a_rank_may_leave_at_once():
    for _ in range(5):
        assert on_ranks(6, lambda _: None) == [None] * 6


def test_a_tensor_is_a_result():
    [a, b] = on_ranks(2, lambda world: torch.full((1 << 20,), float(world.rank)))
    assert torch.equal(a, torch.zeros(1 << 20))
    assert torch.equal(b, torch.ones(1 << 20))


def test_messages_of_a_rank_arrive_in_the_order_sent():
    def work(world: World) -> None:
        for i in range(5000):
            world.send(i)

    seen: dict[int, list[object]] = {0: [], 1: []}
    on_ranks(2, work, on_message=lambda rank, obj: seen[rank].append(obj))
    assert seen == {0: list(range(5000)), 1: list(range(5000))}


def test_messages_arrive_while_the_rank_runs():
    release, held = os.pipe()

    def work(world: World) -> str:
        world.send("ready")
        return os.read(release, 7).decode()

    assert on_ranks(1, work, on_message=lambda *_: os.write(held, b"go on")) == ["go on"]
    os.close(release)
    os.close(held)


def test_an_error_in_on_message_ends_every_rank():
    pids: list[int] = []

    def work(world: World) -> None:
        world.send(os.getpid())
        signal.pause()

    def refuse(rank: int, pid: object) -> None:
        assert isinstance(pid, int)
        pids.append(pid)
        if len(pids) == 2:
            raise LookupError("no more")

    with pytest.raises(LookupError, match=r"^no more$"):
        on_ranks(2, work, on_message=refuse)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_can_be_started_outside_the_main_thread():
    results: list[list[float]] = []
    thread = threading.Thread(target=lambda: results.append(on_ranks(2, total)))
    thread.start()
    thread.join()
    assert results == [[3.0, 3.0]]


def test_signal_handlers_are_given_back():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    on_ranks(1, lambda _: None)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("port", [None, 0])
def test_a_second_attempt_starts_afresh(port, caplog):
    def work(world: World) -> tuple[int, float]:
        value = total(world)
        if world.attempt == 0 and world.rank == 1:
            raise ValueError("once")
        return world.attempt, value

    assert on_ranks(2, work, max_restarts=2, port=port) == [(1, 3.0), (1, 3.0)]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "attempt 1 of 3: rank 1: ValueError: once; starting again"
    ]


def test_the_last_attempt_is_the_one_reported():
    def work(world: World) -> None:
        raise ValueError(f"attempt {world.attempt}")

    with pytest.raises(RanksFailed) as caught:
        on_ranks(1, work, max_restarts=2)
    assert caught.value.fault.headline == "rank 0: ValueError: attempt 2"


def test_a_port_that_is_taken_is_a_bad_request():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RequestError) as caught:
            on_ranks(2, total, port=port)
    assert str(caught.value) == (
        f"launch.port: port {port} on 127.0.0.1 cannot be used: Address already in use; null takes a free one"
    )


def test_output_of_ranks_goes_to_their_logs(tmp_path, caplog, capfd):
    def work(world: World) -> None:
        print(f"printed by {world.rank}")
        os.write(2, f"native {world.rank}\n".encode())
        logging.getLogger("launcher.test").info("logged by %d", world.rank)

    caplog.set_level(logging.INFO, logger="launcher")
    on_ranks(2, work, folder=tmp_path)
    first, second = ((tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1))
    assert [r.getMessage() for r in caplog.records] == ["logged by 0"]
    assert capfd.readouterr() == ("printed by 0\n", "native 0\n")
    assert first.endswith(" INFO launcher.test: logged by 0\n")
    assert first.count("\n") == 1
    assert sorted(line.split("launcher.test: ")[-1] for line in second.splitlines()) == [
        "logged by 1",
        "native 1",
        "printed by 1",
    ]
    assert not (tmp_path / "errors").exists()


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(RanksFailed) as caught:
        on_ranks(1, lambda _: sys._getframe())
    assert caught.value.fault.headline == "rank 0: TypeError: cannot pickle 'frame' object"
