"""Plans of a search by several processes at once: those of one trace by the same one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

from launcher.planner.search.evaluate import Question
from launcher.planner.search.layout import Trace
from launcher.planner.traces import Traces

COLLECTED = 50_000
"""Objects more before cycles among them are looked for: plans make many objects, and few cycles."""
UNEQUAL = 2
"""Plans more that a process has to make before another one follows a forward once again."""


class Task(Protocol):
    """Something to plan."""

    @property
    def trace(self) -> Trace: ...


T = TypeVar("T", bound=Task)
R = TypeVar("R")


@dataclass
class Workers:
    """``traces``: of this process, which is the first of them; ``others``: lines to the rest."""

    asked: Question
    traces: Traces
    others: Sequence[Connection] = ()
    at: dict[Trace, set[int]] = field(default_factory=dict)

    def __call__(self, tasks: Sequence[T], do: Callable[[Question, T, Traces], R]) -> list[R]:
        """What comes of each, in their order. Raises what a process raised."""
        mine: list[int] = []
        for task in tasks:
            mine.append(self._worker(task.trace, mine))
        each = list(zip(tasks, mine, strict=True))
        for n, line in enumerate(self.others, 1):
            line.send((do, [task for task, at in each if at == n]))
        found = {0: iter([do(self.asked, task, self.traces) for task, at in each if at == 0])}
        for n, line in enumerate(self.others, 1):
            answer = line.recv()
            if isinstance(answer, BaseException):
                raise answer
            found[n] = iter(answer)
        return [next(found[at]) for at in mine]

    def _worker(self, trace: Trace, taken: Sequence[int]) -> int:
        """One that has followed this forward, unless another has much less to do; ``taken``: by whom."""
        knows = self.at.setdefault(trace, set())
        least = min(range(1 + len(self.others)), key=taken.count)
        known = min(knows, key=lambda n: (taken.count(n), n), default=least)
        chosen = least if taken.count(known) - taken.count(least) >= UNEQUAL else known
        knows.add(chosen)
        return chosen


@contextmanager
def workers(asked: Question, traces: Traces, count: int) -> Iterator[Workers]:
    """``count`` processes, this one among them; they end with the block."""
    context = get_context("spawn")
    lines, processes = [], []
    for _ in range(count - 1):
        line, end = context.Pipe()
        process = context.Process(
            target=_serve, args=(end, asked, traces.keeps_messages, traces.shallow), daemon=True
        )
        process.start()
        end.close()
        lines.append(line)
        processes.append(process)
    try:
        with _collected_seldom():
            yield Workers(asked, traces, lines)
    finally:
        for line in lines:
            line.close()
        for process in processes:
            process.join(1)
            if process.is_alive():
                process.terminate()
                process.join()


def _serve(line: Connection, asked: Question, keeps_messages: bool | None, shallow: bool) -> None:
    """Plans what comes, until nobody asks any more."""
    traces = Traces(own=True, keeps_messages=keeps_messages, shallow=shallow)
    with _collected_seldom():
        while True:
            try:
                do, tasks = line.recv()
            except EOFError:
                return
            try:
                line.send([do(asked, task, traces) for task in tasks])
            except Exception as error:  # told to who asked
                line.send(error)


@contextmanager
def _collected_seldom() -> Iterator[None]:
    """In this process, as long as it plans."""
    often, *older = gc.get_threshold()
    gc.set_threshold(max(often, COLLECTED) if often else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(often, *older)
