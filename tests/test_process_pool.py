"""Child processes answer tasks in order and in bounded memory; a failure is one line, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RunError
from launcher.extras.layout_search.search import PLANNER as PLANNER
from launcher.process_pool import AHEAD, Interpreter, Workers, workers
from launcher.runtime.processes.fork_server import start_here

OWN = partial(Interpreter, module="launcher.errors", environ={"SEEN_BY": "a child"})
each_start = pytest.mark.parametrize("start", [OWN, start_here], ids=["own interpreter", "fork"])
LARGE = 4 << 20  # more than a connection takes in one write


def doubled(n: int) -> int:
    time.sleep(0.02 * (n % 3 == 0))
    return 2 * n


def failed(n: int) -> int:
    if n == 2:
        raise KeyError(n)
    return n


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("no such thing")
        self.cause = lambda: 0


def unpicklable(_: int) -> int:
    raise Unpicklable


def killed(signum: int) -> None:
    os.kill(os.getpid(), signum)


def ended(code: int) -> None:
    os._exit(code)


def echoed(data: bytes) -> bytes:
    return data[::-1]


def place(_: object) -> tuple[int, str | None]:
    time.sleep(0.05)
    return os.getpid(), os.environ.get("SEEN_BY")


def printed(text: str) -> None:
    print(text, flush=True)


@each_start
def test_answers_come_in_the_order_of_the_tasks_from_children_and_from_here(start: Any) -> None:
    with workers(2, start, "a child") as crew:
        assert list(crew.map(doubled, range(20))) == [2 * n for n in range(20)]
        assert list(crew.map(doubled, range(20), prefer=lambda n: n % 2, here=doubled)) == [2 * n for n in range(20)]
        assert list(crew.map(doubled, [])) == []
    assert list(Workers([], "nobody").map(doubled, [1, 2], here=doubled)) == [2, 4]


def test_tasks_are_read_only_a_few_ahead() -> None:
    read = []

    def tasks() -> Iterator[int]:
        for n in range(30):
            read.append(n)
            yield n

    with workers(2, OWN, "a child") as crew:
        for n, _ in enumerate(crew.map(doubled, tasks())):
            assert len(read) <= n + 1 + AHEAD * 3


@each_start
def test_large_tasks_and_answers_do_not_block_each_other(start: Any) -> None:
    tasks = [bytes([n]) * LARGE for n in range(8)]
    with workers(1, start, "a child") as crew:
        assert list(crew.map(echoed, tasks)) == tasks


def test_a_child_keeps_to_the_tasks_that_it_knows() -> None:
    with workers(2, OWN, "a child") as crew:
        tasks = ["a", "b"]
        first = dict(zip(tasks, crew.map(place, tasks, prefer=str), strict=True))
        again = dict(zip(tasks, crew.map(place, tasks[::-1], prefer=str), strict=True))
    assert {pid for pid, _ in first.values()} == {pid for pid, _ in again.values()}
    assert len({pid for pid, _ in first.values()}) == 2
    assert first == {"a": again["b"], "b": again["a"]}
    assert {seen for _, seen in first.values()} == {"a child"}


@each_start
def test_an_error_of_a_task_is_raised_when_its_answer_is_due(start: Any) -> None:
    with workers(2, start, "a child") as crew:
        answers = crew.map(failed, range(5))
        assert [next(answers), next(answers)] == [0, 1]
        with pytest.raises(KeyError, match=r"^2$"):
            next(answers)


def test_an_error_that_cannot_be_pickled_is_told_by_its_message() -> None:
    with workers(1, OWN, "a child") as crew, pytest.raises(RunError, match=r"^Unpicklable: no such thing"):
        list(crew.map(unpicklable, [1]))


@pytest.mark.parametrize(
    ("do", "task", "says"),
    [
        (killed, signal.SIGKILL, "a child was killed; the system kills processes when memory runs out"),
        (killed, signal.SIGTERM, "a child was ended by SIGTERM"),
        (ended, 3, "a child ended with exit code 3"),
    ],
)
def test_a_child_that_ends_is_a_line(do: Callable[[int], None], task: int, says: str) -> None:
    with workers(2, OWN, "a child") as crew, pytest.raises(RunError) as caught:
        list(crew.map(do, [task]))
    assert str(caught.value) == says


def test_a_planner_that_ends_is_a_line() -> None:
    with workers(1, start_here, PLANNER) as crew, pytest.raises(RunError) as caught:
        list(crew.map(killed, [signal.SIGKILL] * 2))
    assert str(caught.value) == (
        "a process that plans layouts for this search has ended: a user or the system killed it "
        "(out of memory? see dmesg)"
    )


def test_prints_of_a_child_are_no_output_of_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    with workers(1, OWN, "a child") as crew:
        list(crew.map(printed, ["something"]))
    assert capfd.readouterr() == ("", "something\n")


ASKS = """
import os, sys
from tests.test_process_pool import OWN, place, workers, sleeping
with workers(1, OWN, "a child") as crew:
    [(pid, _)] = crew.map(place, [0])
    print(pid, flush=True)
    list(crew.map(sleeping, [os.getpid()]))
"""


def sleeping(asks: int) -> None:
    os.kill(asks, signal.SIGKILL)
    time.sleep(1e6)


def test_a_child_that_is_at_work_ends_with_the_process_that_asked() -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", ASKS], cwd=root, check=False, stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    file = Path(f"/proc/{int(done.stdout)}/stat")
    while file.exists() and " Z " not in file.read_text():  # its new parent may not wait for it
        time.sleep(0.05)
