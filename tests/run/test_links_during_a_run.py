"""A link takes the place of an entry of a run folder while it trains: what it leads to is not changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.runtime.run_folder import FOLDERS
from launcher.runtime.training.metrics_file import Metrics
from tests.run.launching import TINY, shape
from tests.tiers import some

WORDS = (
    *TINY, *shape(), "launch.mode=inproc", "train.steps=4", "checkpoint.every=2", "steps=[train,save,predict,export]",
    "debug.profiler={steps: [3,4]}", "parallel.local_norm.dump=run:norms/deep", "logger.csv=true",
)  # fmt: skip
LATER = ("norms", "predictions.safetensors", "metrics.csv", "status.json", "report.html", "checkpoints/latest",
         "checkpoints/step-000004", "checkpoints/step-000004.partial", "exports/model.safetensors")  # fmt: skip


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def replace(path: Path, theirs: Path) -> None:
    """Puts a link at ``path`` to a copy of what is there; if nothing is, to a folder of somebody else."""
    if path.exists():
        path.rename(path.with_name(f"{path.name}.old"))
        old = path.with_name(f"{path.name}.old")
        shutil.copytree(old, theirs / "x") if old.is_dir() else shutil.copy(old, theirs / "x")
    else:
        (theirs / "x/step-000004").mkdir(parents=True)
    if (theirs / "x").is_dir():
        for name in ("precious", "rank0.json", "rank0.jsonl", "rank0.json.gz", "model.safetensors"):
            (theirs / "x" / name).write_text("precious")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(theirs / "x")


@pytest.mark.parametrize("name", some([*FOLDERS, *LATER]))
def test_what_a_link_leads_to_is_not_changed(tmp_path, monkeypatch, capfd, name):
    theirs, before, was = tmp_path / "theirs", Metrics.write, {}
    theirs.mkdir()

    def write(self, row):
        if row.get("step") == 2 and not was:
            replace(tmp_path / "run" / name, theirs)
            was.update(content(theirs) or {"": b""})
        before(self, row)

    monkeypatch.setattr(Metrics, "write", write)
    code = main([*WORDS, f"run_dir={tmp_path / 'run'}"])
    output = capfd.readouterr()
    assert (content(theirs) or {"": b""}) == was
    assert "Traceback" not in output.err
    assert code in (0, 1)
    if code:
        assert f"{tmp_path / 'run' / name}: " in output.err


@pytest.mark.parametrize(
    ("name", "setting"),
    [("norms", "parallel.local_norm.dump=run:norms/deep"), ("s", "parallel.operator_strategy.save=run:s/x.json"),
     ("p.jsonl", "steps.predict.to=run:p.jsonl")],
)  # fmt: skip
def test_a_link_at_a_name_of_a_setting_is_refused_before_anything_starts(tmp_path, capfd, name, setting):
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(tmp_path)
    words = [*TINY, *shape(), "train.steps=2", "steps=[train,predict]", setting, f"run_dir={run}"]
    assert main(words) == 2
    assert f"{run} is not a run folder: {run / name}: a link, which is not followed" in capfd.readouterr().err
    assert [path.name for path in run.iterdir()] == [name]
