"""metrics.jsonl, and the log of local gradient norms."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from launcher.checkpoint.tensorfile.disk import BLOCK, Unwritten, named_errors, write_text
from launcher.checkpoint.tensorfile.watched_folder import make_folder, open_file
from launcher.errors import RunError
from launcher.plan.resolve.checkpoint import AVERAGED
from launcher.runtime.cluster.messages import gather
from launcher.untrusted.files import brief, parsed

if TYPE_CHECKING:
    from launcher.parallel.grad_norm import OwnGradients
    from launcher.runtime.cluster.world import World

_log = logging.getLogger(__name__)

Place = tuple[int, bool, int]
LONGEST = 1 << 24
"""The most bytes of a row, and of what a kill leaves behind the last one."""


class Metrics:
    """Appends rows; each is written before the next step. NaN and infinities are written as ``null``.

    ``first_step`` is the next step to be written: rows from there on, and a line that a kill left incomplete,
    are removed. The same happens if a row is repeated, as a restarted attempt resumes from its checkpoint.
    Raises ``RunError``, and changes nothing, for a file that no run has written.
    ``table`` names a CSV file of all rows, written when the block ends. ``patient``: on a full disk rows wait
    in memory until there is space or the block ends; otherwise ``Unwritten`` is raised at once.
    """

    def __init__(
        self, path: Path, first_step: int = 0, table: Path | None = None, patient: bool = False
    ) -> None:
        self._path = path
        self._table = table
        self._patient = patient
        with named_errors(path, BLOCK):
            self._fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        try:
            os.ftruncate(self._fd, _kept(path, self._fd, (first_step, False, 0)))
            self._last = max(map(_place, Rows(path, self._fd)), default=(0, False, 0))
        except BaseException:
            os.close(self._fd)
            raise
        self._waiting = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._flush()
            if self._table is not None:
                with named_errors(self._path, 0):
                    write_csv(Rows(self._path, self._fd), self._table)
        except RunError as problem:
            if error is None:
                raise
            _log.warning("%s", problem)
        finally:
            os.close(self._fd)

    def write(self, row: Mapping[str, Any]) -> None:
        # a repeated step replaces its earlier row
        at = _place(row)
        if at <= self._last:
            self._flush()
            os.ftruncate(self._fd, _kept(self._path, self._fd, at))
        self._last = at

        # on a full disk rows wait until there is space
        waited = bool(self._waiting)
        self._waiting += json.dumps(_finite(row), allow_nan=False).encode() + b"\n"
        try:
            self._flush()
        except Unwritten as full:
            if not self._patient:
                self._waiting.clear()
                raise
            if not waited:
                _log.warning("%s; rows wait in memory until there is space", full)

    def _flush(self) -> None:
        """Writes all waiting rows, or none of them."""
        end = os.fstat(self._fd).st_size
        try:
            with named_errors(self._path, len(self._waiting), present=end):
                rest = memoryview(bytes(self._waiting))
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        self._waiting.clear()


@dataclass(frozen=True)
class Rows:
    """Every complete row of the file ``path``; one row at a time is in memory.

    ``fd`` reads the open file: by now the path may lead to another one.
    """

    path: Path
    fd: int | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row for _, row in _rows_with_ends(self.path, self.fd))


def read(path: Path) -> list[dict[str, Any]]:
    """Returns every complete row."""
    return [*Rows(path)]


def write_csv(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Writes a column for each key, in order of first appearance; empty if a row lacks it."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns)
    table.writeheader()
    table.writerows(rows)
    write_text(path, text.getvalue())


def _rows_with_ends(path: Path, fd: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each row with the offset of its end, up to what a kill left incomplete.

    Raises ``RunError`` for a line that no run has written.
    """
    end = 0
    with path.open("rb") if fd is None else open(fd, "rb", closefd=False) as file:
        file.seek(0)
        for number in count(1):
            line = file.readline(LONGEST)
            if not _complete(line):
                rest = file.read(LONGEST).splitlines(keepends=True)
                if file.read(1) or any(map(_complete, rest)):
                    raise _foreign(path, number, "it is not JSON, and more follows")
                return
            row = parsed(line)
            if why := _flaw(row):
                raise _foreign(path, number, why)
            end += len(line)
            yield end, row


def _complete(line: bytes) -> bool:
    """Returns true if the line is JSON.

    A line of zeros is not: the file grew but its data never reached the disk.
    """
    try:
        parsed(line)
    except ValueError:
        return False
    return line.endswith(b"\n")


def _flaw(row: Any) -> str:
    """Returns why no run has written this row, or ""."""
    if not isinstance(row, dict):
        return f"{brief(row)} is not a JSON object"
    if "step" not in row:
        return "it has no step"
    for key in ("step", "steps", "after"):
        value = row.get(key, 0)
        if type(value) is not int or value < 0:
            return f"{key} is {brief(value)}, not a whole number from 0 on"
    for key, value in row.items():
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            return f"{brief(key)} is {brief(value)}, not a finite number"
    return ""


def _foreign(path: Path, number: int, why: str) -> RunError:
    cure = "correct the line, or move the file away to continue without its rows"
    return RunError(f"{path}: line {number}: not a row of a run: {why}; {cure}")


def _place(row: Mapping[str, Any]) -> Place:
    """Returns the sort key of a row: a validation follows the row of its step.

    A validation of the moving average follows that of the weights. A validation of an older checkpoint
    belongs to the training step after which that was loaded.
    """
    last = 2 * ("after" in row) + (f"val_loss{AVERAGED}" in row)
    return row.get("after", row.get("step", -1)), "loss" not in row, last


def _kept(path: Path, fd: int, first: Place) -> int:
    """Returns the bytes of the rows that sort before ``first``."""
    end = 0
    for at, row in _rows_with_ends(path, fd):
        if _place(row) >= first:
            break
        end = at
    return end


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


FEW = 4


@dataclass
class LocalNormLog:
    """Logs local norms. ``device``: one number per rank instead of one per parameter.

    ``scale`` undoes the mean over data-parallel ranks.
    """

    own: OwnGradients
    world: World
    emit: Callable[[dict[str, Any]], None]
    print: bool
    dump: Path | None
    device: bool
    scale: float
    _file: Metrics | None = field(default=None, init=False)

    def tell(self, step: int, loud: bool, loss_scale: float = 1.0) -> None:
        """Reports a step's norms if ``loud``, otherwise drops them; every rank calls this.

        The step's gradients were multiplied by ``loss_scale``.
        """
        norms = self.own.take(self.scale / loss_scale)
        if not loud:
            return
        if self.device:
            norms = {"": math.sqrt(sum(n * n for n in norms.values()))}
        if self.dump is not None:
            self._write(self.dump, step, norms)
        if self.print:
            every = gather(norms, dict[str, float])
            if every is not None:
                self.emit({"text": "\n".join(lines(step, every))})

    def _write(self, folder: Path, step: int, norms: Mapping[str, float]) -> None:
        """Appends to ``rank<N>.jsonl``; first removes rows of this step and later, from earlier attempts."""
        if self._file is None:
            make_folder(folder)
            self._file = Metrics(folder / f"rank{self.world.rank}.jsonl", step)
        row = {"norm": norms[""]} if self.device else {"norms": dict(norms)}
        self._file.write({"step": step, **row})


def lines(step: int, every: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns one line per parameter, in the order of the ranks that have it.

    >>> lines(3, [{"w": 0.5, "b": 1.0}, {"w": 0.25}])
    ['local_norm, step 3: w 0.5 on rank 0, 0.25 on rank 1', 'local_norm, step 3: b 1 on rank 0']
    """
    names = list(dict.fromkeys(name for norms in every for name in norms))
    start = f"local_norm, step {step}: "
    # the name "" means all parameters
    return [f"{start}{name and f'{name} '}{_spread(name, every)}" for name in names]


def _spread(name: str, every: Sequence[Mapping[str, float]]) -> str:
    """Returns each rank's number; for many ranks only the smallest and the largest.

    >>> _spread("w", [{"w": float(n)} for n in range(6)])
    '0 (rank 0) to 5 (rank 5) on 6 ranks'
    """
    by_rank = [(norms[name], rank) for rank, norms in enumerate(every) if name in norms]
    if len(by_rank) <= FEW:
        return ", ".join(f"{n:.4g} on rank {rank}" for n, rank in by_rank)
    (least, first), (most, last) = min(by_rank), max(by_rank)
    return f"{least:.4g} (rank {first}) to {most:.4g} (rank {last}) on {len(by_rank)} ranks"
