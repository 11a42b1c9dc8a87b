"""``status``, ``logs`` and ``cancel`` for the folder of a sweep: applies them to its cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import DONE, Problem, RequestError, RunError
from launcher.extras.sweep import folder
from launcher.plan.values.text import many
from launcher.run import slurm, status_logs_cancel

NOTHING = "no run yet"


def carry_out(words: Sequence[str]) -> int:
    """Runs a command on the folder of a sweep or a run. Raises ``RequestError`` and ``RunError``."""
    check(words)
    at = Path(words[1])
    if not _is_sweep(at):
        return status_logs_cancel.carry_out(words)
    status_logs_cancel.show({"status": _status, "cancel": _cancel}[words[0]](at, _cells(at)))
    return DONE


def check(words: Sequence[str]) -> None:
    """Raises ``RequestError`` if the command cannot take the folder."""
    name, *rest = words
    if len(rest) != 1 or not _is_sweep(Path(rest[0])):
        status_logs_cancel.check(words)
    elif name == "logs":
        at = Path(rest[0])
        one = next(iter(_cells(at)), at)
        text = f"logs {at}: is a sweep, and each cell has its own log: launcher logs {one}"
        raise RequestError((Problem("", text, "", tuple(words)),))


def _is_sweep(at: Path) -> bool:
    return (at / folder.INDEX).exists()


def _cells(at: Path) -> list[Path]:
    return [at / cell for cell in folder.known_cells(at)]


def _status(at: Path, cells: Sequence[Path]) -> Iterator[str]:
    """Yields one line per cell, then the number of cells in each state."""
    pruned, states = folder.pruned(at), Counter[str]()
    for cell in cells:
        state, *more = list(status_logs_cancel.progress(cell)) or [NOTHING]
        if cell.name in pruned:
            state = f"pruned: {pruned[cell.name]}"
        states[state.partition(":")[0]] += 1
        yield "; ".join([f"{cell.name}: {state}", *more])
    counts = ", ".join(f"{n} {state}" for state, n in states.most_common())
    yield f"{at}: {many(len(cells), 'cell')}: {counts}" if cells else f"{at}: no cell has started"


def _cancel(at: Path, cells: Sequence[Path]) -> Iterator[str]:
    """Cancels all Slurm jobs of the cells in one call."""
    candidates = (status_logs_cancel.cancellable(cell) for cell in cells)
    recorded = dict.fromkeys(number for number in candidates if number is not None)
    alive = slurm.jobs() if recorded else frozenset()  # a killed job has not recorded that it ended
    numbers = [number for number in recorded if number in alive]
    if not numbers:
        text = "no cell is a queued or running Slurm job; cells that run on this machine end with the sweep"
        raise RunError(f"{at}: {text}")
    slurm.ask(["scancel", *numbers])
    jobs = many(len(numbers), "job")
    yield f"cancelled {jobs} of Slurm; cells that were training save, and the sweep's command resumes them"
