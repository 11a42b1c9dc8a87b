"""The table of verbs agrees with the files of ``launcher.steps``, and a verb from outside works like ours."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from launcher import run_job
from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.verbs import VERBS
from tests.run.launching import TINY, checkpoints, shape, status
from tests.steps import count_verb
from tests.steps.count_verb import Count

STEPS = Path(__file__).parents[2] / "launcher" / "steps"
PLACES = {"ranks": "run_on_ranks", "alone": "run_on_files", "files": "run_on_files"}


def test_each_verb_has_a_file_and_each_file_a_verb() -> None:
    own = {"file_checks", "on_files", "on_ranks", "rank_entry_points", "sent_to_ranks"}
    modules = {row.module for row in VERBS.values()}
    assert len(modules) == len(VERBS)
    files = {f"launcher.steps.{p.stem}" for p in STEPS.glob("[a-z]*.py") if p.stem not in own}
    assert files == {m for m in modules if m.startswith("launcher.steps.")}
    assert all((STEPS.parents[1] / f"{m.replace('.', '/')}.py").is_file() for m in modules)


@pytest.mark.parametrize("kind", VERBS)
def test_a_file_has_what_its_row_says(kind: str) -> None:
    row, module = VERBS[kind], import_module(VERBS[kind].module)
    places = ["ranks", "alone"] if kind == "evaluate" else ["files"] if callable(row.where) else [row.where]
    runs = ["run_copies", "copies", "BUILDS"] if row.copies else [PLACES[where] for where in places]
    assert [name for name in [*runs, *(["check"] if row.checks else [])] if not hasattr(module, name)] == []
    assert row.checks == hasattr(module, "check")


def test_the_checks_of_verbs_import_no_torch() -> None:
    modules = [row.module for row in VERBS.values() if row.checks]
    code = f"import sys\nfor m in {modules!r}: __import__(m)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=STEPS.parents[1])
    assert (done.stdout, done.stderr) == ("False\n", "")


def job(folder: Path, *, layout: dict[str, int], **counts: Count) -> Job:
    """A job that trains, saves and counts."""
    asked = compose([*TINY, f"run_dir={folder}", "train.steps=1", *shape(**layout)]).job
    return asked.model_copy(update={"steps": asked.steps | counts})


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a row for the verb ``count``."""
    monkeypatch.setitem(VERBS, "count", count_verb.ROW)  # type: ignore[arg-type]


@pytest.mark.usefixtures("counted")
def test_a_verb_from_outside_runs_on_ranks_and_on_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps = {"count": Count(), "recount": Count(of="checkpoint")}
    figures: dict[str, Any] = run_job(job(tmp_path / "run", layout={"pp": 2, "shard": 2}, **steps))
    whole, out = figures["counted"], capfd.readouterr().out
    assert 0 < figures["mine"] < whole
    assert f"count: {figures['mine']} numbers on rank 0\n" in out
    assert f"recount: {whole} numbers\n" in out
    assert status(tmp_path / "run")["steps"] == ["train", "save", "count", "recount"]


@pytest.mark.usefixtures("counted")
def test_a_verb_from_outside_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refused:
        run_job(job(tmp_path / "run", layout={}, count=Count(of="checkpoint", src=f"{tmp_path}/nowhere")))
    assert str(refused.value) == f"steps.count.src: {tmp_path}/nowhere: no checkpoint: no such folder"
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("counted")
def test_the_order_of_a_verb_from_outside_is_looked_at_too(tmp_path: Path) -> None:
    asked = job(tmp_path / "run", layout={})
    with pytest.raises(RequestError) as refused:
        run_job(asked.model_copy(update={"steps": {"count": Count(of="checkpoint")} | asked.steps}))
    assert str(refused.value) == (
        "steps.count: needs a checkpoint, but 'save', which makes it, comes after 'count' "
        "(try: 'steps=[train,save,count]')"
    )
    assert checkpoints(tmp_path / "run") == []
