"""``steps=[export]`` of a finished run exports its last checkpoint; another model's is refused before the start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.__main__ import main
from launcher.checkpoint.export_one_file import read_full
from launcher.errors import RunError
from launcher.steps.export import _check_rounding

SMALL = ["recipe=mlp_autoparallel", "train.steps=1", "logger=plain"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    assert main([*SMALL, "steps=[train,save]", f"run_dir={run}"]) == 0
    return run


def test_an_export_of_a_finished_run_needs_no_path(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "steps=[export]", f"run_dir={finished}"]) == 0
    assert f"export: {finished}/exports/model.safetensors, " in capsys.readouterr().out
    assert "layer1.weight" in read_full(finished / "exports/model.safetensors")


def test_a_folder_without_a_checkpoint_is_refused_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "steps=[export]", f"run_dir={tmp_path}"]) == 2
    assert "steps.export: needs a checkpoint, but there is no 'save' step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "key"),
    [
        ("load,evaluate", "steps.load.path"),
        ("train", "checkpoint.resume"),
        ("export", "steps.export.src"),
        ("verify", "steps.verify.src"),
        ("transform", "steps.transform.src"),
    ],
)
@pytest.mark.parametrize("inside", ["", "/checkpoints"])
def test_a_run_folder_where_a_checkpoint_is_meant_is_answered_with_the_newest(
    finished: Path, steps: str, key: str, inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cure names the newest checkpoint in the named folder."""
    named, newest = f"{finished}{inside}", f"{finished}/checkpoints/step-000001"
    assert main([*SMALL, f"steps=[{steps}]", f"{key}={named}", f"runs={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert f" {named}: holds checkpoints, but is not one; the newest is {newest}\n" in said
    assert f"    try:    {key}={newest}\n" in said


def test_the_run_that_is_imported_is_told_to_be_resumed(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "steps=[import]", f"steps.import.src={finished}"]) == 2
    why = f"{finished}: {finished}/checkpoints/step-000001 in it is a checkpoint of this launcher and needs no import"
    assert f" {why}; use it as checkpoint.resume\n" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused_or_written_without_a_check(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = finished / "checkpoints/step-000001"
    words = [
        "recipe=lm_single",
        "model=lm_tiny",
        "steps=[export]",
        f"steps.export.src={src}",
        f"run_dir={tmp_path}/run",
    ]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"steps.export.src: {src} belongs to another model than this request, so they cannot be compared: " in said
    assert not (tmp_path / "run").exists()
    assert main([*words, "steps.export.check=false"]) == 0
    assert "layer1.weight" in read_full(tmp_path / "run/exports/model.safetensors")


def test_beside_another_models_run_nothing_is_offered_that_trains_anew(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe=lm_single", "model=lm_tiny", "steps=[export]", f"run_dir={finished}"]) == 2
    said = capsys.readouterr().err
    assert f"run_dir: {finished}/checkpoints/step-000001 is of another model: " in said
    assert "    try: " not in said


def test_a_weight_that_is_not_the_nearest_of_its_dtype_is_named_also_beside_a_nan():
    trained = {"w": torch.tensor([1.001, float("nan"), 3.0])}
    written = {"w": trained["w"].bfloat16()}
    assert _check_rounding(trained, written) == "bfloat16"
    written["w"][0] = 2.0
    with pytest.raises(RunError, match=r"w differs from the checkpoint's value rounded to torch\.bfloat16"):
        _check_rounding(trained, written)
