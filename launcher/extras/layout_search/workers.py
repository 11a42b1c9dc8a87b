"""Processes that plan a search's layouts in parallel; each takes the next task when it is free."""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Protocol, TypeVar

from launcher.errors import RunError
from launcher.extras.layout_search.candidates import Trace
from launcher.extras.layout_search.evaluate import Question
from launcher.planner.trace_model import Traces

COLLECTED = 50_000
"""New objects before Python looks for cycles: plans make many objects but few cycles."""
AHEAD = 2
"""Tasks that another process has queued, so that it does not wait while this process plans."""


class Line(Protocol):
    """A process that was started: its connection, and ways to end it."""

    @property
    def connection(self) -> Connection: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


Start = Callable[..., Line]
"""Calls ``function(connection, *args)`` in a new process."""


class Task(Protocol):
    """A layout to plan."""

    @property
    def trace(self) -> Trace: ...


T = TypeVar("T", bound=Task)
R = TypeVar("R")


@dataclass
class Workers:
    """``traces``: those of this process, which is worker 0; ``others``: connections to the other workers."""

    asked: Question
    traces: Traces
    others: Sequence[Connection] = ()
    knows: dict[int, set[Trace]] = field(default_factory=lambda: defaultdict(set))

    def __call__(self, tasks: Sequence[T], do: Callable[[Question, T, Traces], R]) -> list[R]:
        """Returns the result of each task, in order. Raises what a worker raised."""
        found: dict[int, R] = {}
        open_ = list(range(len(tasks)))
        given: dict[Connection, deque[int]] = {line: deque() for line in self.others}
        while len(found) < len(tasks):
            # serve the other workers first: they plan while this process does
            for n, (line, has) in enumerate(given.items(), 1):
                while open_ and len(has) < (AHEAD if len(open_) > AHEAD else 1):
                    has.append(self._next(n, tasks, open_))
                    with _alive():
                        line.send((do, tasks[has[-1]]))
            if open_:
                mine = self._next(0, tasks, open_)
                found[mine] = do(self.asked, tasks[mine], self.traces)

            busy = [line for line, has in given.items() if has]
            ready = wait(busy, 0 if open_ else None) if busy else ()
            for line in (one for one in busy if one in ready):
                with _alive():
                    answer = line.recv()
                if isinstance(answer, BaseException):
                    raise answer
                found[given[line].popleft()] = answer
        return [found[n] for n in range(len(tasks))]

    def _next(self, worker: int, tasks: Sequence[T], open_: list[int]) -> int:
        """Takes a task whose forward this worker has traced before, if there is one."""
        chosen = min(open_, key=lambda n: (tasks[n].trace not in self.knows[worker], n))
        open_.remove(chosen)
        self.knows[worker].add(tasks[chosen].trace)
        return chosen


@contextmanager
def _alive() -> Iterator[None]:
    """Wraps communication with a worker. Raises ``RunError`` if it has ended."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        text = "a process that plans layouts for this search has ended: a user or the system killed it"
        raise RunError(f"{text} (out of memory? see dmesg)") from error


@contextmanager
def workers(asked: Question, traces: Traces, count: int, start: Start | None = None) -> Iterator[Workers]:
    """``count`` processes including this one, which end with the block; only this one without ``start``."""
    lines: list[Line] = []
    try:
        for _ in range(count - 1 if start else 0):
            assert start is not None
            lines.append(start(_serve, asked, traces.keeps_messages, traces.shallow))
        with _collected_seldom():
            yield Workers(asked, traces, [line.connection for line in lines])
    finally:
        for line in lines:
            line.kill()
            line.close()


def _serve(line: Connection, asked: Question, keeps_messages: bool | None, shallow: bool) -> None:
    """Runs tasks until the connection closes."""
    traces = Traces(own=True, keeps_messages=keeps_messages, shallow=shallow)
    with _collected_seldom():
        while True:
            try:
                do, task = line.recv()
            except (EOFError, ConnectionError):
                return
            try:
                answer = do(asked, task, traces)
            except Exception as error:  # sent to the process that asked
                answer = error
            try:
                line.send(answer)
            except ConnectionError:  # the process that asked was killed
                return


@contextmanager
def _collected_seldom() -> Iterator[None]:
    """Makes garbage collections rare in this process while it plans."""
    often, *older = gc.get_threshold()
    gc.set_threshold(max(often, COLLECTED) if often else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(often, *older)
