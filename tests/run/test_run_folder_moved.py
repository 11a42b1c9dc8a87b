"""A run folder is moved, deleted or replaced while its training saves: the run ends and writes nothing more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.checkpoint import store
from launcher.checkpoint.write import RankWriter
from tests.run.launching import TINY, checkpoints, shape, status

SAYS = "the run folder was deleted or moved during the run"
UNFINISHED = shutil.ignore_patterns("*.partial")  # the other rank writes there


def rename(run: Path) -> None:
    run.rename(run.parent / "moved")


def copied(run: Path) -> Path:
    """Return a copy of the run folder; a second copy is kept to compare with."""
    left, other = run.parent / "left", run.parent / "other"
    shutil.copytree(run, left, ignore=UNFINISHED)
    return Path(shutil.copytree(left, other))  # copies the first copy, because the run still writes


def replace(run: Path) -> None:
    other = copied(run)
    rename(run)
    other.rename(run)


def link(run: Path) -> None:
    other = copied(run)
    rename(run)
    run.symlink_to(other.name)


def delete(run: Path) -> None:
    """Delete the folder in one step: another rank still writes there, so removing it in place would fail."""
    gone = run.with_name("gone")
    run.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


GONE = {"moved": rename, "deleted": delete, "replaced": replace, "a link to another": link}
SAVES = {"save": "false", "async save": "true"}


def content(run: Path) -> dict[str, bytes] | None:
    files = (path for path in run.rglob("*") if path.is_file())
    return {str(path.relative_to(run)): path.read_bytes() for path in files} if run.exists() else None


@pytest.mark.parametrize("happens", GONE.values(), ids=GONE)
@pytest.mark.parametrize("saves", SAVES.values(), ids=SAVES)
def test_a_run_whose_folder_goes_while_it_saves_ends_and_writes_nothing_there(
    tmp_path, monkeypatch, capfd, happens, saves
):
    before, seen = RankWriter.write, tmp_path / "run"

    def write(self, *rest):
        if "000004" in self.folder.name and self.rank == 0:
            happens(seen)
        return before(self, *rest)

    monkeypatch.setattr(RankWriter, "write", write)
    words = [*TINY, *shape(shard=2), "checkpoint.every=2", f"checkpoint.async={saves}", "checkpoint.keep=1"]
    assert main([*words, "train.steps=40", f"run_dir={seen}"]) == 1
    errors = capfd.readouterr().err.splitlines()
    assert any(line.startswith("error: ") and f"{seen}: {SAYS}" in line for line in errors)
    assert not any("Traceback" in line for line in errors)
    assert content(seen) in (None, content(tmp_path / "left"))  # None: the rank was killed before it replaced it
    if happens is not delete:
        moved = tmp_path / "moved"
        assert [name for name in checkpoints(moved) if "partial" not in name] == ["step-000002"]
        assert status(moved)["status"] == "failed"
        assert store.latest(moved / "checkpoints") == moved / "checkpoints/step-000002"


def test_an_export_into_a_folder_that_goes_is_not_written(tmp_path, monkeypatch, capfd):
    from launcher.steps import export

    seen, before = tmp_path / "run", export.export_folder

    def moved(run):
        if seen.exists():
            rename(seen)
        return before(run)

    monkeypatch.setattr(export, "export_folder", moved)
    words = [*TINY, *shape(), "train.steps=2", "steps=[train,save,export]", "launch.mode=inproc"]
    assert main([*words, f"run_dir={seen}"]) == 1
    assert f"error: export: {seen}: {SAYS}" in capfd.readouterr().err
    assert not seen.exists()
