"""All models in all layouts, several at a time, each in its own process."""

from __future__ import annotations

import multiprocessing as mp
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

from tests.parity.zoo.case import Case
from tests.parity.zoo.cell import LIMIT_S, Verdict, judge
from tests.parity.zoo.layouts import LAYOUTS

Results = dict[str, dict[str, Verdict]]


def run(cases: Sequence[Case], layouts: Sequence[str], jobs: int, tell: Callable[[str], None] = print) -> Results:
    """Run ``jobs`` models at a time. If a model ends its process or times out, only that cell is lost."""
    found: Results = {c.name: {} for c in cases}
    waiting = [(c, list(layouts)) for c in reversed(cases)]
    live: dict[Connection, tuple[Case, list[str], mp.Process]] = {}
    while waiting or live:
        while waiting and len(live) < jobs:
            case, rest = waiting.pop()
            live |= _start(case, rest)
        for end in wait(list(live)):
            assert isinstance(end, Connection)
            case, rest, process = live[end]
            try:
                layout, verdict = end.recv()
            except EOFError:
                del live[end]
                process.join()
                if rest:
                    found[case.name][rest[0]] = _lost(process.exitcode)
                    waiting += [(case, rest[1:])] if rest[1:] else []
                continue
            rest.remove(layout)
            found[case.name][layout] = verdict
            if not verdict.fine:
                tell(f"{case.name}, {layout}: {verdict.kind}: {verdict.text.splitlines()[-1] if verdict.text else ''}")
    return found


def _start(case: Case, layouts: list[str]) -> dict[Connection, tuple[Case, list[str], mp.Process]]:
    here, there = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=_judge_all, args=(case, list(layouts), there))
    process.start()
    there.close()
    return {here: (case, layouts, process)}  # type: ignore[dict-item]


def _judge_all(case: Case, layouts: list[str], out: Connection) -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for layout in layouts:
        signal.alarm(10 * LIMIT_S)
        out.send((layout, judge(case, LAYOUTS[layout])))
    signal.alarm(0)


def _lost(code: int | None) -> Verdict:
    late = code == -signal.SIGALRM
    return Verdict("HANG" if late else "CRASH", f"the process that planned it ended with {code}")


def counts(found: Results) -> dict[str, int]:
    kinds = [v.kind for row in found.values() for v in row.values()]
    return {k: kinds.count(k) for k in ("exact", "refused", "WRONG", "CRASH", "HANG", "BADCURE", "ILLEGAL")}


def timed(work: Callable[[], Results]) -> tuple[Results, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def failing(found: Results) -> Iterator[tuple[str, str, Verdict]]:
    for name, row in found.items():
        for layout, verdict in row.items():
            if not verdict.fine:
                yield name, layout, verdict
