"""No rank outlives the run, however the run ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from launcher.runtime.faults import Interrupted
from launcher.runtime.processes.supervise import signal_pipe
from tests.forked import python
from tests.ranks import on_ranks


@contextmanager
def waiting(*how: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run in another process, and a descriptor for each rank that becomes readable when the rank has ended."""
    with (
        tempfile.TemporaryDirectory() as tmp,  # a run that is killed leaves its store behind
        python("tests.runtime.waiting", *how, env={"TMPDIR": tmp}, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        ranks = []
        try:
            for _ in range(2):
                ranks.append(os.pidfd_open(int(process.stdout.readline())))
            yield process, ranks
        finally:
            process.kill()
            for fd in ranks:
                os.close(fd)


def ended(pidfd: int, within_s: float) -> bool:
    ready = select.poll()  # select() takes no number above 1023
    ready.register(pidfd, select.POLLIN)
    return bool(ready.poll(within_s * 1000))


@pytest.mark.parametrize("how", [[], ["deaf"], ["served"]], ids=["willing", "deaf", "served"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_signal_to_the_parent_ends_every_rank_before_it_ends(signum, how):
    with waiting(*how) as (process, ranks):
        process.send_signal(signum)
        assert process.wait(timeout=300) == 128 + signum
        assert all(ended(rank, within_s=0) for rank in ranks)
        assert process.stdout is not None
        assert process.stdout.read() == f"stopped by {signum.name}\n"


@pytest.mark.parametrize("how", [[], ["deaf"], ["served"]], ids=["willing", "deaf", "served"])
def test_the_death_of_the_parent_ends_every_rank(how):
    with waiting(*how) as (process, ranks):
        process.kill()
        assert process.wait(timeout=300) == -signal.SIGKILL
        assert all(ended(rank, within_s=300) for rank in ranks)


def test_the_whole_terminal_gets_ctrl_c_and_one_process_answers():
    with waiting() as (process, ranks):
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=300) == 130
        assert all(ended(rank, within_s=0) for rank in ranks)


def test_a_signal_stops_the_run_for_good():
    attempts = []

    def stop(rank: int, attempt: object) -> None:
        attempts.append(attempt)
        signal.raise_signal(signal.SIGTERM)

    def work(world):
        world.send(world.attempt)
        signal.pause()

    with pytest.raises(Interrupted, match=r"^stopped by SIGTERM$") as error:
        on_ranks(1, work, max_restarts=3, on_message=stop)
    assert error.value.signum == signal.SIGTERM
    assert attempts == [0]


def test_a_signal_that_nobody_read_in_time_is_not_lost():
    def work() -> None:
        with signal_pipe():
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        work()


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signal_pipe() as fd:
            signal.raise_signal(signal.SIGINT)
            assert fd is not None
            assert not ended(fd, within_s=0)
    finally:
        signal.signal(signal.SIGINT, before)
