"""How long before the end of its time a job is told to save."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from launcher.job.schema.job import Slurm
from launcher.plan.partition.sizes import Note

KEY = "launch.slurm.signal_s"
USUAL = 300
"""Seconds, if nothing has been measured."""
LEAST, TIMES = 30, 2
"""The least seconds, and the factor for a measured step and save, as later ones may take longer."""


def resolved(slurm: Slurm, runs: Sequence[Path]) -> tuple[Slurm, Note | None]:
    """Sets ``signal_s`` from the times of steps and saves in ``runs``, if there are any."""
    if slurm.signal_s is not None:
        return slurm, None
    found = [took for run in runs if (took := _measured(run)) is not None]
    if not found:
        return slurm.model_copy(update={"signal_s": USUAL}), None
    step, save = (max(times) for times in zip(*found, strict=True))
    seconds = max(LEAST, ceil(TIMES * (step + save)))
    text = f"null -> {seconds}: for a step that took {step:.1f} s and a save that took {save:.1f} s"
    return slurm.model_copy(update={"signal_s": seconds}), Note(KEY, text)


def _measured(run: Path) -> tuple[float, float] | None:
    """Seconds of the longest step after the first, and of the longest save; ``None`` if one is unknown."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as lines:
        rows = [*_rows(lines)]
    steps = [row["step_ms"] for row in rows[1:] if isinstance(row.get("step_ms"), int | float)]
    saves = [row["save_stall_ms"] for row in rows if isinstance(row.get("save_stall_ms"), int | float)]
    return (max(steps) / 1e3, max(saves) / 1e3) if steps and saves else None


def _rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The complete rows; the last line may be incomplete."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
