"""When a job is asked to save: twice the measured time of a step and a save before the end of the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.job.schema.launch import Slurm
from launcher.run.slurm import LEAST, USUAL, with_signal_s


def rows(folder: Path, *steps_s: float, save_s: float | None = None) -> Path:
    folder.mkdir()
    found = [{"step": n, "loss": 1.0, "step_ms": 1e3 * s} for n, s in enumerate(steps_s, 1)]
    if save_s is not None:
        found[-1]["save_stall_ms"] = 1e3 * save_s
    text = "".join(json.dumps(row) + "\n" for row in found)
    (folder / "metrics.jsonl").write_text(text + '{"step": 9, "step_ms": 1e9')  # torn
    return folder


def test_nothing_is_measured_before_the_first_start(tmp_path: Path) -> None:
    assert with_signal_s(Slurm(), ())[0].signal_s == USUAL
    assert with_signal_s(Slurm(), (tmp_path,)) == (Slurm(signal_s=USUAL), None)
    assert with_signal_s(Slurm(), (rows(tmp_path / "unsaved", 9.0, 2.0),))[0].signal_s == USUAL


def test_a_signal_s_of_the_request_is_not_changed(tmp_path: Path) -> None:
    assert with_signal_s(Slurm(signal_s=77), (rows(tmp_path / "a", 1.0, 2.0, save_s=3.0),)) == (
        Slurm(signal_s=77),
        None,
    )


@pytest.mark.parametrize(("save_s", "seconds"), [(40.0, 84), (0.5, LEAST)], ids=["measured", "least"])
def test_signal_s_is_twice_the_longest_later_step_plus_the_longest_save(
    save_s: float, seconds: int, tmp_path: Path
) -> None:
    slurm, note = with_signal_s(Slurm(), (rows(tmp_path / "a", 90.0, 2.0, 1.0, save_s=save_s),))
    assert slurm.signal_s == seconds
    text = f"null -> {seconds}: for a step that took 2.0 s and a save that took {save_s:.1f} s"
    assert str(note) == f"launch.slurm.signal_s {text}"


def test_cells_that_share_a_job_have_time_for_the_slowest(tmp_path: Path) -> None:
    runs = (rows(tmp_path / "a", 9.0, 1.0, save_s=50.0), rows(tmp_path / "b", 9.0, 8.0, save_s=1.0))
    assert with_signal_s(Slurm(), runs)[0].signal_s == 116
