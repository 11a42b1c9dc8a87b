"""The results of a drill: when the fault was detected, what it cost, and whether weights are bit-equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.checkpoint.manifest import FILE_OF, read_manifest
from launcher.checkpoint.store import latest
from launcher.checkpoint.tensorfile.disk import write_text
from launcher.errors import RunError
from launcher.extras.drill import record
from launcher.plan.drill import DrillFault
from launcher.plan.resolve.encryption import Trust

FILE = "drill.json"
Hear = Callable[[int, object], None]


@dataclass(frozen=True)
class DrillReport:
    """``detected_s`` and ``recovered_s`` count from the fault; recovery is the first finished step after it.

    ``steps_lost``: steps that had to be repeated. ``differing``: tensors, by file, of the last checkpoint
    that differ from the undisturbed run. ``None`` means that it did not happen.
    """

    drill: str
    fault: DrillFault
    detected_s: float | None
    recovered_s: float | None
    resumed_step: int | None
    steps_lost: int | None
    tensors: int
    differing: tuple[str, ...]

    @property
    def identical(self) -> bool:
        return not self.differing


def watching(run: Path, fault: DrillFault, hear: Hear) -> Hear:
    """Returns ``hear`` extended to record when the ranks' news first report the fault."""

    def both(rank: int, news: object) -> None:
        if isinstance(news, dict) and _names(news, fault) and record.read(run, record.HAPPENED, fault):
            record.note(run, record.DETECTED, fault)
        hear(rank, news)

    return both


def _names(news: Mapping[str, Any], fault: DrillFault) -> bool:
    if fault.kind == "slow_rank":
        return news.get("worst_rank") in fault.ranks and int(news["step"]) >= fault.step
    words = {"disk_full": "was not written", "bitflip": "is damaged and skipped"}
    return fault.kind in words and words[fault.kind] in str(news.get("text"))


def note_detection(run: Path, fault: DrillFault, again: bool = False) -> None:
    """Records when the failure of ranks was detected, before the next start removes their error files.

    ``again``: this is a new start, so the failure was detected although no rank recorded when.
    """
    happened = record.read(run, record.HAPPENED, fault)
    if happened is None or fault.kind in ("slow_rank", "bitflip"):  # detected in the ranks' news
        return
    faults = [json.loads(path.read_text(encoding="utf-8")) for path in run.glob("errors/rank*.json")]
    times = [f["time_ns"] for f in faults if f["time_ns"] >= happened["time_ns"]]
    if times:
        record.note(run, record.DETECTED, fault, time_ns=min(times))
    elif again:
        record.note(run, record.DETECTED, fault)


def report(run: Path, undisturbed: Path, fault: DrillFault, trust: Trust) -> DrillReport:
    """Builds the report. Raises ``RunError`` if the fault has not happened."""
    happened = record.read(run, record.HAPPENED, fault)
    if happened is None:
        raise RunError(f"drill: {fault} did not happen: training ended first")
    note_detection(run, fault)
    since = happened["time_ns"]
    seen, on = (record.read(run, name, fault) for name in (record.DETECTED, record.RECOVERED))
    tensors, differing = _compared(run, undisturbed, trust)
    resumed = None if on is None else int(on["resumed"])
    return DrillReport(
        drill=str(fault),
        fault=fault,
        detected_s=None if seen is None else (seen["time_ns"] - since) / 1e9,
        recovered_s=None if on is None else (on["time_ns"] - since) / 1e9,
        resumed_step=resumed,
        steps_lost=_lost(fault, resumed),
        tensors=tensors,
        differing=differing,
    )


def _lost(fault: DrillFault, resumed: int | None) -> int | None:
    if not fault.restarts:
        return 0
    return None if resumed is None else fault.done - resumed


def _compared(run: Path, undisturbed: Path, trust: Trust) -> tuple[int, tuple[str, ...]]:
    """Returns the number of tensors in the last checkpoints of both, and those that differ, weights first."""
    mine, other = (_digests(folder / "checkpoints", trust) for folder in (run, undisturbed))
    names = sorted(mine.keys() | other.keys(), key=lambda name: (FILE_OF["param"] not in name, name))
    return len(names), tuple(n for n in names if mine.get(n) != other.get(n))


def _digests(checkpoints: Path, trust: Trust) -> dict[str, str]:
    newest = latest(checkpoints, trust)
    if newest is None:
        raise RunError(f"{checkpoints}: the drill left no checkpoint to compare")
    files = read_manifest(newest).files
    return {
        f"{newest.name}/{path}: {name}": digest
        for path in files
        for name, digest in files[path].tensors.items()
    }


def lines(outcome: DrillReport) -> Iterator[str]:
    """Yields the table at the end of the run."""
    yield f"drill of {outcome.drill}"
    yield f"  detected       {_after(outcome.detected_s)}"
    going = "" if outcome.resumed_step is None else f", resumed after step {outcome.resumed_step}"
    if outcome.fault.restarts:
        yield f"  recovered      {_after(outcome.recovered_s)}{going}"
    yield f"  steps lost     {'unknown' if outcome.steps_lost is None else outcome.steps_lost}"
    n = len(outcome.differing)
    same = f"yes, all {outcome.tensors} tensors of weights, optimizer and random streams"
    yield f"  bit-identical  {same if outcome.identical else f'no, {n} of {outcome.tensors} tensors differ'}"


def _after(seconds: float | None) -> str:
    return "never" if seconds is None else f"after {seconds:.2f} s"


def finish(
    run: Path, undisturbed: Path, fault: DrillFault, trust: Trust, say: Callable[[str], None], strict: bool
) -> None:
    """Writes ``drill.json`` and prints the table.

    Raises ``RunError`` if the fault was not detected, if training did not resume, or, if ``strict``, when the
    weights differ.
    """
    outcome = report(run, undisturbed, fault, trust)
    write_text(
        run / FILE, json.dumps(asdict(outcome) | {"bit_identical": outcome.identical}, indent=1) + "\n"
    )
    say("\n".join(lines(outcome)))
    wrong = []
    if outcome.detected_s is None:
        wrong.append("the fault was not detected")
    if outcome.recovered_s is None and fault.restarts:
        wrong.append("no step was finished after the fault")
    if strict and not outcome.identical:
        wrong.append(f"the checkpoint differs from that of the undisturbed run: {outcome.differing[0]}")
    if wrong:
        raise RunError(f"drill of {fault}: {'; '.join(wrong)}")
