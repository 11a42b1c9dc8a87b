"""Settings left open: what is found runs, trains the numbers of one process, and is a recipe by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.__main__ import main
from launcher.job.compose import compose
from launcher.job.schema.search import Search
from launcher.run.recipe_of_job import text
from tests.run.launching import TINY, losses, run, shape, steps

OPEN = ("parallel=auto", "parallel.hsdp=[null,{shard_size: 2}]", "cluster=here", "launch.nproc=2")


def test_a_layout_that_was_found_trains_the_losses_of_one_process(tmp_path: Path) -> None:
    one = run(tmp_path / "one", *shape(), steps=3)
    found = run(tmp_path / "found", *OPEN, steps=3)
    assert losses(found) == pytest.approx(losses(one), rel=1e-5)
    assert steps(found) == [1, 2, 3]
    settled = yaml.safe_load((found / "config.yaml").read_text())
    assert settled["search"]["over"] == {}


def test_what_show_search_writes_is_a_recipe_that_runs_and_is_certified(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = (*TINY, *OPEN, "train.steps=2", "steps=[train,certify]")
    assert main([*asked, "show=search", "run_dir=asked"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("search over ")
    assert "recipe     plan/best.yaml: python -m launcher recipe=plan/best.yaml" in shown
    assert not Path("asked").exists()

    written = Path("plan/best.yaml").read_text()
    job = compose(["recipe=plan/best.yaml"]).job
    assert text(job, ()) == written[written.index("defaults:") :]
    assert job.search == Search()
    assert main(["recipe=plan/best.yaml", "run_dir=best", "logger=plain"]) == 0
    assert "certify: holds: " in capsys.readouterr().out

    # again only over what a search has written
    assert main([*asked, "show=search"]) == 0
    Path("plan/best.yaml").write_text("mine: true\n")
    assert main([*asked, "show=search"]) == 2
    assert "  search.best = plan/best.yaml: is there, and no search has written it\n" in capsys.readouterr().err
