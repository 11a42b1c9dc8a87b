"""``logger.tensorboard``, read by tensorboard itself."""

from __future__ import annotations

import json
import threading
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launcher.__main__ import main
from launcher.extras.loggers import process
from launcher.extras.loggers.sinks import FOLDER, TensorBoard
from launcher.optional import install_command
from tests.run.launching import TINY, metrics, run, shape


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    read = EventAccumulator(str(folder / FOLDER), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def texts(folder: Path) -> dict[str, str]:
    read = EventAccumulator(str(folder / FOLDER), size_guidance={"tensors": 0})
    read.Reload()
    return {tag: b"".join(read.Tensors(tag)[-1].tensor_proto.string_val).decode() for tag in read.Tags()["tensors"]}


def same(folder: Path) -> None:
    """Check that each number of ``metrics.jsonl`` is logged once."""
    want: dict[str, list[tuple[int, float]]] = {}
    for row in metrics(folder):
        for key, value in row.items():
            if key not in ("step", "steps"):
                name = f"val/{key[4:]}" if key.startswith("val_") else f"train/{key}"
                want.setdefault(name, []).append((row["step"], value))
    found = scalars(folder)
    assert found.keys() == want.keys()
    for tag, points in want.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        assert [v for _, v in found[tag]] == pytest.approx([v for _, v in points], rel=1e-6), tag


WORDS = (*shape(), "train.eval_every=2", "schedule=constant", "logger.tensorboard=true")


def test_a_resumed_run_continues_its_curves(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    folder = run(tmp_path / "run", *WORDS, steps=4)
    same(folder)
    run(folder, *WORDS, steps=7)
    same(folder)
    assert {*threading.enumerate()} <= before
    assert texts(folder) == {
        "config.yaml": f"```\n{(folder / 'config.yaml').read_text().replace('steps: 7', 'steps: 4')}\n```",
        "plan.txt": texts(folder)["plan.txt"],
    }
    assert "```\nplan of " in texts(folder)["plan.txt"]


def test_a_logger_that_is_added_later_gets_the_earlier_curves(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", *WORDS[:-1], steps=3)
    assert not (folder / FOLDER).exists()
    run(folder, *WORDS, steps=5)
    same(folder)


def test_steps_that_are_trained_again_replace_the_logged_ones(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": n, "steps": 6, "loss": float(n)} for n in range(1, 6)]
    board = TensorBoard(tmp_path, [], {})
    for row in rows:
        board.feed(row)
    board.feed({"step": 4, "steps": 6, "val_loss": 9.0})  # a step that is logged already
    board.feed({"step": 3, "steps": 6, "loss": 30.0})
    board.close()
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert not scalars(tmp_path).get("val/loss")


@pytest.mark.parametrize("where", ["_text", "feed", "close"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its file stays open
def test_a_failing_tensorboard_ends_no_run(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(TensorBoard, where, fails)
    folder = run(tmp_path / "run", *WORDS, steps=3)
    assert json.loads((folder / "status.json").read_text())["status"] == "done"
    said = [r.getMessage() for r in caplog.records]
    assert said == ["tensorboard: 'a bug'; the run continues without it"]


def test_a_package_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = util.find_spec
    monkeypatch.setattr(process, "find_spec", lambda name: None if name == "tensorboard" else real(name))
    assert main([*TINY, *WORDS, f"run_dir={tmp_path}/run", "train.steps=1"]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  logger.tensorboard = true: tensorboard is not installed: {install_command('tensorboard')}\n"
        "    set by: logger.tensorboard=true (command line)\n"
    )
    assert not (tmp_path / "run").exists()
