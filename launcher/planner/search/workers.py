"""Plans of a search by several processes at once: those of one trace by the same one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection

from launcher.planner.search.evaluate import Predicted, Question, Refused, evaluate
from launcher.planner.search.layout import Layout
from launcher.planner.traces import Traces

Found = Predicted | Refused


@dataclass
class Workers:
    """``traces``: of this process, which is the first of them; ``others``: lines to the rest."""

    asked: Question
    traces: Traces
    others: Sequence[Connection] = ()
    at: dict[tuple[object, ...], int] = field(default_factory=dict)

    def __call__(self, layouts: Sequence[Layout]) -> list[Found]:
        """What comes of each, in their order. Raises what a process raised."""
        mine = [self._worker(layout) for layout in layouts]
        for n, line in enumerate(self.others, 1):
            line.send([layout for layout, at in zip(layouts, mine, strict=True) if at == n])
        here = [layout for layout, at in zip(layouts, mine, strict=True) if at == 0]
        found = {0: iter([evaluate(self.asked, layout, self.traces) for layout in here])}
        for n, line in enumerate(self.others, 1):
            answer = line.recv()
            if isinstance(answer, BaseException):
                raise answer
            found[n] = iter(answer)
        return [next(found[at]) for at in mine]

    def _worker(self, layout: Layout) -> int:
        """The one that has followed this model's forward, or whose turn it is."""
        trace = (layout.tp, layout.operators, layout.micro, layout.stages == 1)
        return self.at.setdefault(trace, len(self.at) % (1 + len(self.others)))


@contextmanager
def workers(asked: Question, traces: Traces, count: int) -> Iterator[Workers]:
    """``count`` processes, this one among them; they end with the block."""
    context = get_context("spawn")
    lines, processes = [], []
    for _ in range(count - 1):
        line, end = context.Pipe()
        process = context.Process(target=_serve, args=(end, asked, traces.keeps_messages), daemon=True)
        process.start()
        end.close()
        lines.append(line)
        processes.append(process)
    try:
        yield Workers(asked, traces, lines)
    finally:
        for line in lines:
            line.close()
        for process in processes:
            process.join(1)
            if process.is_alive():
                process.terminate()
                process.join()


def _serve(line: Connection, asked: Question, keeps_messages: bool | None) -> None:
    """Plans what comes, until nobody asks any more."""
    traces = Traces(own=True, keeps_messages=keeps_messages)
    while True:
        try:
            layouts = line.recv()
        except EOFError:
            return
        try:
            line.send([evaluate(asked, layout, traces) for layout in layouts])
        except Exception as error:  # told to who asked
            line.send(error)
