"""A step is not done any more once what it wrote is gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from launcher.__main__ import main
from launcher.job.compose import compose
from launcher.job.schema import steps
from launcher.plan.verbs import VERBS
from launcher.run.lost_outputs import output_path, steps_to_repeat
from launcher.steps.file_checks import RunPaths

SMALL = ["recipe=mlp_autoparallel", "train.steps=2", "train.batch_size=8", "logger=plain"]
STEPS = "steps=[train,save,export,transform]"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    assert main([*SMALL, STEPS, f"run_dir={run}"]) == 0
    return run


def test_nothing_is_done_again_while_all_outputs_exist(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, STEPS, f"run_dir={finished}"]) == 0
    assert capsys.readouterr().out == f"already done: {finished}\n"


@pytest.mark.parametrize("lost", ["exports/model.safetensors", "transformed"])
def test_a_lost_output_is_written_again_without_training(
    finished: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = finished / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main([*SMALL, STEPS, f"run_dir={finished}"]) == 0
    said = capsys.readouterr().out
    name = "export" if lost.startswith("exports") else "transform"
    assert f"{name}: {path} no longer exists, so " in said
    assert "step 1/2" not in said
    assert path.exists()


def test_a_lost_checkpoint_is_trained_again_to_the_same_bytes(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished / "checkpoints/step-000002"
    weights, written = folder / "rank_0/model.safetensors", (finished / "exports/model.safetensors").stat()
    before = weights.read_bytes()
    shutil.rmtree(folder)
    assert main([*SMALL, STEPS, f"run_dir={finished}"]) == 0
    said = capsys.readouterr().out
    assert f"train: {folder} no longer exists, so train, save are done again\n" in said
    assert weights.read_bytes() == before
    assert (finished / "exports/model.safetensors").stat() == written


def test_a_lost_file_of_layouts_is_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = "parallel.param_strategy.save='run:s_{rank}.json'"
    words = [*SMALL, "steps=[train]", f"run_dir={tmp_path}/run", saved]
    assert main(words) == 0
    files = [tmp_path / f"run/s_{rank}.json" for rank in range(4)]
    before = [file.read_bytes() for file in files]
    files[1].unlink()
    capsys.readouterr()
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said == f"{files[1]} no longer exists, so it is written again\nalready done: {tmp_path}/run\n"
    assert [file.read_bytes() for file in files] == before


def _delete_rank_file(run: Path) -> None:
    next(run.glob("checkpoints/step-000002/rank_0/model.safetensors")).unlink()


def _delete_nothing(run: Path) -> None:
    pass


@pytest.mark.parametrize(("damage", "repeated"), [(_delete_nothing, ()), (_delete_rank_file, ("train", "save"))])
def test_a_checkpoint_that_lacks_a_file_is_lost(
    finished: Path, tmp_path: Path, damage: Callable[[Path], None], repeated: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    damage(run)
    job = compose([*SMALL, STEPS, f"run_dir={run}"]).job
    done, lines = steps_to_repeat(job, run, ("train", "save", "export", "transform"), {"saved_step": 2})
    assert done == repeated
    line = f"train: {run}/checkpoints/step-000002 is incomplete, so train, save are done again"
    assert lines == ((line,) if repeated else ())


def test_every_step_that_writes_a_file_says_where(tmp_path: Path) -> None:
    """A new verb with an output must have a line in ``output_path``, or its lost output would go unnoticed."""
    job = compose([*SMALL, "steps=[train,save]"]).job
    given = {"src": "a", "dst": "b", "nproc": 1, "tokenizer": "bytes"}
    for kind, row in VERBS.items():
        settings: type[BaseModel] = row.settings
        needed = {k: v for k, v in given.items() if k in settings.model_fields}
        one = job.model_copy(update={"steps": {kind: settings(**needed)}})
        names_a_file = bool(row.output) or "to" in settings.model_fields or settings is steps.Certify
        assert (output_path(RunPaths(kind, one, tmp_path)) is not None) == names_a_file, kind
